"""FLamby's Heart-Disease: its split and its normalisation of the built-in dataset `heart_disease`.

As in FLamby's dataset.py (edacf54): 13 features, two thirds of each centre for training by the
split of scikit-learn with its seed 43 (lines 111-119), and every feature normalised by mean and
deviation of the centre's own training patients (lines 140-167). These read private data, and no ε
covers them, there or here.
"""

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from torch import Tensor

from fedsim.data.builtin.heart_disease import HOSPITAL, load_heart_disease
from fedsim.data.catalog import HeartDiseaseArgs

_FEATURES = 13  # the last one of the dataset, whether cholesterol is known, is not FLamby's
_Array = NDArray[np.float32]
_Centre = tuple[_Array, _Array, _Array, _Array]


def load(seed: int = 0) -> tuple[_Array, ...]:
    """Return (x_train, y_train, x_test, y_test), centre after centre.

    Args:
        seed: not used; the split is fixed.
    """
    return tuple(np.concatenate(parts) for parts in zip(*_centres().values(), strict=True))


def centres(features: _Array, targets: _Array, seed: int = 0) -> NDArray[np.str_]:
    """Return the centre of each training patient of `load`.

    Args:
        features: features of the patients; not used.
        targets: targets of the patients; not used.
        seed: not used.
    """
    parts = _centres()
    return np.repeat([*parts], [len(part[1]) for part in parts.values()])


def mean_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean of the centres' accuracies, as in create_fed_heart_disease_dp_results.py.

    Args:
        outputs: logits (n, 1) of the test patients of `load`.
        targets: 0 or 1 for each of them, (n,).
    """
    sizes = [len(part[3]) for part in _centres().values()]
    hits = ((outputs.reshape(-1) > 0) == (targets.reshape(-1) > 0.5)).double()
    return sum(float(part.mean()) for part in hits.split(sizes)) / len(sizes)


def _centres() -> dict[str, _Centre]:
    data = load_heart_disease(HeartDiseaseArgs(scaled=False))
    features = data.train.features[:, :_FEATURES].astype(np.float32)
    hospitals = np.array(data.groups[HOSPITAL])
    return {
        str(name): _divided(features[hospitals == name], data.train.targets[hospitals == name])
        for name in np.unique(hospitals)
    }


def _divided(x: _Array, ill: NDArray[np.generic]) -> _Centre:
    y = ill.astype(np.float32)
    has_both = min(int(y.sum()), int((1 - y).sum())) > 2
    train, test = train_test_split(
        np.arange(len(x)),
        test_size=0.34,
        train_size=0.66,
        random_state=43,
        stratify=y if has_both else None,
    )
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0, ddof=1)
    x = (x - mean) / (deviation + np.float32(1e-9))
    return x[train], y[train], x[test], y[test]

"""School (139 silos of pupils' exam scores) from `school.mat` of Liu et al. 2022.

As in the authors' code (f16ff76, utils.py:175-212), features are standardised within each silo by
its training pupils, and scores are scaled from 1 ... 70 to 0 ... 1. The first uses statistics of
private examples, which no ε covers. A seed has the authors' division into training and test pupils.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from sklearn.model_selection import train_test_split

Floats = NDArray[np.float64]

_TEST_SHARE = 0.2
_LOWEST, _HIGHEST = 1, 70
_BATCH = 32


def seed_of_division(seed: int) -> int:
    """Return the authors' seed of repetition `seed` (runners/school/main.sh, main.py:251)."""
    return 100 + 1000 * seed


def load(path: str, seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Return (x_train, y_train, x_test, y_test) of all silos, silo after silo.

    Args:
        path: `school.mat`, absolute.
        seed: of each silo's division into training and test pupils.
    """
    parts = zip(*(one[:4] for one in _silos(path, seed)), strict=True)
    return tuple(np.concatenate(part).astype(np.float32) for part in parts)


def silos(
    features: NDArray[np.floating],
    targets: NDArray[np.floating],
    path: str,
    seed: int = 0,
    part: str = "train",
    num_clients: int | None = None,
) -> NDArray[np.int64]:
    """Return the silo of each training pupil of `load`, or of each test pupil.

    Args:
        features: of the pupils; not used.
        targets: of the pupils; not used.
        path: as of `load`.
        seed: as of `load`.
        part: `train` or `test`.
        num_clients: not used; a resumed run knows it.
    """
    index = 1 if part == "train" else 3
    sizes = [len(one[index]) for one in _silos(path, seed)]
    return np.repeat(np.arange(len(sizes)), sizes)


def sampling_rates(path: str) -> list[float]:
    """Return one over the authors' number of batches in an epoch of each silo.

    They leave out the last, incomplete batch, and a silo of fewer pupils has one batch (utils.py:
    39-43, trainers/base.py:55). So an epoch at this rate has as many steps.

    Args:
        path: as of `load`. Sizes are the same in all divisions.
    """
    return [1 / max(1, len(x) // _BATCH) for x, *_ in _silos(path, 0)]


def _silos(path: str, seed: int) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
    content = loadmat(path)
    for x, y in zip(content["X"][0], content["Y"][0], strict=True):
        train, test = train_test_split(
            np.arange(len(x)), test_size=_TEST_SHARE, random_state=seed_of_division(seed)
        )
        mean, deviation = x[train].mean(0), x[train].std(0)
        scaled = (x - mean) / np.where(deviation > 0, deviation, 1.0)
        scores = (y.ravel() - _LOWEST) / (_HIGHEST - _LOWEST)
        yield scaled[train], scores[train], scaled[test], scores[test]

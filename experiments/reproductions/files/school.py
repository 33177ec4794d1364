"""School (139 silos of pupils' exam scores) from `school.mat` of Liu et al. 2022.

As in their code, features are standardised within each silo by its training pupils, and scores are
scaled from 1 ... 70 to 0 ... 1. The first uses statistics of private examples, which no ε covers.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat

Floats = NDArray[np.float64]

_TEST_SHARE = 0.2
_LOWEST, _HIGHEST = 1, 70


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


def _silos(path: str, seed: int) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
    content = loadmat(path)
    for number, (x, y) in enumerate(zip(content["X"][0], content["Y"][0], strict=True)):
        order = np.random.default_rng([seed, number]).permutation(len(x))
        test = order[: round(_TEST_SHARE * len(x))]
        train = order[len(test) :]
        mean, deviation = x[train].mean(0), x[train].std(0)
        scaled = (x - mean) / np.where(deviation > 0, deviation, 1.0)
        scores = (y.ravel() - _LOWEST) / (_HIGHEST - _LOWEST)
        yield scaled[train], scores[train], scaled[test], scores[test]

"""The digits with one split for all seeds, so that runs differ in batches and noise alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TRAIN = 1400


def load(seed: int = 0) -> tuple[NDArray[Any], ...]:
    """Return features and classes of 1,400 training and 397 test images; `seed` changes nothing."""
    found = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(found[0]))
    x, y = np.asarray(found[0])[order] / 16, np.asarray(found[1])[order]
    return x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:]

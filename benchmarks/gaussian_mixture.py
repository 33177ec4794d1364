"""A made-up classification task: `data.dataset` of the federations that `advice.py` generates."""

import numpy as np

_TEST_EXAMPLES = 1500


def load(
    seed: int = 0,
    *,
    examples: int,
    dims: int,
    classes: int,
    clusters: int,
    separation: float,
    decay: float,
    norm: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return examples of classes that are mixtures of Gaussians, and a test set of 1,500.

    Args:
        seed: of the draw.
        examples: number of training examples.
        dims: number of values of an example.
        classes: number of classes, of about equal size.
        clusters: Gaussians of a class; with more than one, no linear model is perfect.
        separation: distance of the means, in standard deviations of the noise along a dimension.
        decay: power by which the standard deviations of the dimensions fall.
        norm: root mean square length of an example.
    """
    rng = np.random.default_rng(seed)
    scales = np.arange(1, dims + 1, dtype=np.float64) ** -decay
    scales *= np.sqrt(dims / np.square(scales).sum())
    means = rng.normal(size=(classes, clusters, dims)) * scales * separation * 3 / np.sqrt(dims)
    count = examples + _TEST_EXAMPLES
    y = rng.integers(classes, size=count)
    x = means[y, rng.integers(clusters, size=count)] + rng.normal(size=(count, dims)) * scales
    x *= norm / np.sqrt(np.square(x).sum(axis=1).mean())
    x = x.astype(np.float32)
    return x[:examples], y[:examples], x[examples:], y[examples:]

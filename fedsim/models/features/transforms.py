"""The transforms: functions of one example, float64 in, float64 out.

Each is called with one example at a time and nothing else, so no value of another example can
reach a feature, whatever order or instructions numpy uses. Sums are numpy's or elementwise: no
matrix library is called.
"""

from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.streams import Purpose, stream
from fedsim.models.features.orientations import orientations
from fedsim.models.features.scattering import scattering
from fedsim.models.features.settings import RandomFourierSettings, StandardizeSettings

Example = NDArray[np.float64]
Transform = Callable[[Example], Example]


def make_transform(name: str, value: Any, shape: tuple[int, ...]) -> Transform:
    """Return the function of a transform.

    Args:
        name: name of the transform.
        value: its argument or settings.
        shape: shape of the examples that it gets.
    """
    return _TRANSFORMS[name](value, shape)


def _center(value: float | list[float] | str, shape: tuple[int, ...]) -> Transform:
    if value == "own":
        return lambda x: x - x.mean()
    constant = _per_channel(value, shape)
    return lambda x: x - constant


def _unit_norm(value: object, shape: tuple[int, ...]) -> Transform:
    def transform(x: Example) -> Example:
        largest = np.abs(x).max()
        if largest == 0:
            return x
        x = x / largest  # so that no square overflows or vanishes
        return x / np.sqrt(np.square(x).sum())

    return transform


def _log(value: float, shape: tuple[int, ...]) -> Transform:
    return lambda x: np.sign(x) * np.log1p(np.abs(x) / value)


def _standardize(value: StandardizeSettings, shape: tuple[int, ...]) -> Transform:
    mean, std = _per_channel(value.mean, shape), _per_channel(value.std, shape)
    return lambda x: (x - mean) / std


def _random_fourier(value: RandomFourierSettings, shape: tuple[int, ...]) -> Transform:
    """Return sqrt(2 / dim) cos(x W sqrt(2 gamma) + b).

    W is standard normal and b uniform in [0, 2π). Products of features have the expectation
    exp(-gamma ||x - y||²). (Rahimi and Recht, "Random features for large-scale kernel machines",
    NIPS 2007, figure 1.)
    """
    source = stream(value.seed, Purpose.FEATURES)
    directions = source.standard_normal((prod(shape), value.dim)) * sqrt(2 * value.gamma)
    phases = source.uniform(0.0, 2 * np.pi, value.dim)
    scale = sqrt(2 / value.dim)

    def transform(x: Example) -> Example:
        return scale * np.cos((x.reshape(-1, 1) * directions).sum(axis=0) + phases)

    return transform


def _per_channel(value: object, shape: tuple[int, ...]) -> Example:
    constant = np.asarray(value, dtype=np.float64)
    return constant.reshape(-1, *(1,) * (len(shape) - 1)) if constant.ndim else constant


_TRANSFORMS: Mapping[str, Callable[[Any, tuple[int, ...]], Transform]] = {
    "center": _center,
    "unit_norm": _unit_norm,
    "log": _log,
    "standardize": _standardize,
    "orientations": orientations,
    "random_fourier": _random_fourier,
    "scattering": scattering,
}

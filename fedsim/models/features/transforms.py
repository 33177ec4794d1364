"""The feature transforms (functions of float64 examples), and the pipeline that applies them.

The features of an example do not depend on other examples, not even by rounding. Only operations
whose results IEEE 754 defines to the last bit (+, -, *, /, square root) are computed for many
examples at once. Sums, powers and other functions are computed for one example at a time (`_each`).
Sums are computed by numpy, without a library for matrix products.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.core.streams import Purpose, stream
from fedsim.data.examples import DataError
from fedsim.models.catalog import ModelError
from fedsim.models.features.scattering import scattering
from fedsim.models.settings import (
    FeatureSettings,
    HogSettings,
    RandomFourierSettings,
    Shape,
    StandardizeSettings,
    shape_after,
)

Examples = NDArray[np.float64]  # (n, ...)
Transform = Callable[[Examples], Examples]

_VALUES_AT_ONCE = 1 << 14  # of examples that are transformed together: they stay in the cache


def _each(function: Callable[..., Any], *arrays: Examples) -> Examples:
    """Return the results of a function for one example at a time, in an array (n, ...)."""
    return np.array([function(*parts) for parts in zip(*arrays, strict=True)])


def _column(numbers: Examples, x: Examples) -> Examples:
    """Return one number for each of the examples `x` in a shape that numpy applies to them."""
    return numbers.reshape(-1, *(1,) * (x.ndim - 1))


def _center(value: float | list[float] | str, shape: tuple[int, ...]) -> Transform:
    if value == "own":
        return lambda x: x - _column(_each(np.mean, x), x)
    constant = _per_channel(value, shape)
    return lambda x: x - constant


def _unit_norm(value: object, shape: tuple[int, ...]) -> Transform:
    def transform(x: Examples) -> Examples:
        largest = np.abs(x).reshape(len(x), -1).max(axis=1)
        zero = largest == 0
        x = x / _column(np.where(zero, 1.0, largest), x)  # so that no square overflows or vanishes
        norm = np.sqrt(_each(np.sum, np.square(x)))
        return x / _column(np.where(zero, 1.0, norm), x)

    return transform


def _log(value: float, shape: tuple[int, ...]) -> Transform:
    return lambda x: np.sign(x) * _each(np.log1p, np.abs(x) / value)


def _standardize(value: StandardizeSettings, shape: tuple[int, ...]) -> Transform:
    mean, std = _per_channel(value.mean, shape), _per_channel(value.std, shape)
    return lambda x: (x - mean) / std


def _random_fourier(value: RandomFourierSettings, shape: tuple[int, ...]) -> Transform:
    """Return the function x -> sqrt(2 / dim) cos(x W sqrt(2 gamma) + b).

    W is standard normal and b uniform in [0, 2π). Products of features have the expectation
    exp(-gamma ||x - y||²). (Rahimi and Recht, "Random features for large-scale kernel machines",
    NIPS 2007, figure 1.)
    """
    source = stream(value.seed, Purpose.FEATURES)
    directions = source.standard_normal((prod(shape), value.dim)) * sqrt(2 * value.gamma)
    phases = source.uniform(0.0, 2 * np.pi, value.dim)
    scale = sqrt(2 / value.dim)

    def transform(x: Examples) -> Examples:
        return scale * np.cos((x.reshape(-1, 1) * directions).sum(axis=0) + phases)

    return partial(_each, transform)


def _hog(value: HogSettings, shape: tuple[int, ...]) -> Transform:
    """Return the function that maps an image to orientation maps (channels * bins, rows, columns).

    The maps show where an image has edges, and of which direction. Gradients are central
    differences. The magnitude of each is divided between the two nearest of `bins` directions. Each
    direction's map is summed over overlapping windows with Hann weights, as in histograms of
    oriented gradients. (Dalal and Triggs, CVPR 2005; SIFT: Lowe, IJCV 2004.)

    Edge case: an image that is constant in a channel has maps of zeros there.
    """
    directions = np.arange(value.bins).reshape(-1, 1, 1)
    rows, columns = (_pixels(side, value.window, value.stride) for side in shape[-2:])

    def transform(images: Examples) -> Examples:
        channels = images.reshape(-1, *shape[-2:])
        maps = _maps(np.pad(channels, [(0, 0), (1, 1), (1, 1)], mode="edge"), directions)
        across = sum((weight * maps[..., pixels] for weight, pixels in columns), np.zeros(()))
        sums = sum((weight * across[..., pixels, :] for weight, pixels in rows), np.zeros(()))
        of_images = sums.reshape(len(images), -1, *sums.shape[-2:])
        return _each(lambda x: x**value.power, of_images)

    return transform


def _maps(padded: Examples, directions: NDArray[np.int64]) -> Examples:
    """Return the gradient magnitude (n, bins, height, width) of each direction.

    Args:
        padded: images with repeated border pixels, (n, height + 2, width + 2).
        directions: numbers of the directions, (bins, 1, 1).
    """
    down = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2
    right = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2
    bins = len(directions)
    place = _each(np.arctan2, down, right) * (bins / (2 * np.pi))  # from -bins / 2 to bins / 2
    distance = np.abs(place[:, None] - directions)  # less than two turns: `bins` is one turn
    share = np.maximum(0.0, 1.0 - np.minimum(distance, np.abs(bins - distance)))
    return share * _each(np.hypot, down, right)[:, None]


def _pixels(side: int, window: int, stride: int) -> tuple[tuple[float, slice], ...]:
    """Return the Hann weight and the index of each pixel of a window, over all windows of a side.

    Args:
        side: height or width of the image, in pixels.
        window: side of a window, in pixels.
        stride: pixels between windows.
    """
    last = stride * ((side - window) // stride) + 1
    weights = np.hanning(window + 2)[1:-1].tolist()
    return tuple((weight, slice(i, i + last, stride)) for i, weight in enumerate(weights))


def _per_channel(value: object, shape: tuple[int, ...]) -> Examples:
    constant = np.asarray(value, dtype=np.float64)
    return constant.reshape(-1, *(1,) * (len(shape) - 1)) if constant.ndim else constant


_TRANSFORMS: Mapping[str, Callable[[Any, tuple[int, ...]], Transform]] = {
    "center": _center,
    "unit_norm": _unit_norm,
    "log": _log,
    "standardize": _standardize,
    "hog": _hog,
    "random_fourier": _random_fourier,
    "scattering": lambda value, shape: partial(_each, scattering(value, shape)),
}


class FeaturePipeline:
    """The sequence of fixed transforms in `model.features`, applied to each example.

    Guarantee: the features of an example are a function of that example and public constants. Other
    examples do not change them in any bit.

    Args:
        features: the setting `model.features`.
    """

    def __init__(self, features: Sequence[FeatureSettings]) -> None:
        self._features = tuple(features)

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of one example's features after all transforms.

        Args:
            input_shape: shape of one example in the dataset.

        Raises:
            ModelError: a transform cannot be applied to examples of that shape.
        """
        return shape_after(self._features, input_shape) or ()

    def __call__(self, examples: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features (n, *output_shape) of examples (n, *input_shape).

        Raises:
            ModelError: a transform does not take examples of that shape, or the examples are
                tokens.
            DataError: a feature is not a finite float32 number.
        """
        shape = examples.shape[1:]
        if examples.dtype != np.float32:
            raise ModelError(
                "model.features takes numbers, and data.features: tokens gives positions of an "
                "embedding; remove one of them"
            )
        result = np.empty((len(examples), *self.output_shape(shape)), np.float32)
        transforms = self._transforms(shape)
        with np.errstate(all="ignore"):  # checked below
            step = max(1, _VALUES_AT_ONCE // prod(shape))
            for start in range(0, len(examples), step):
                values = examples[start : start + step].astype(np.float64)
                for transform in transforms:
                    values = transform(values)
                result[start : start + step] = values
        _check_finite(result)
        return result

    def _transforms(self, shape: Shape) -> list[Transform]:
        transforms: list[Transform] = []
        for feature in self._features:
            transforms.append(_TRANSFORMS[feature.name](feature.value, shape))
            shape = shape_after([feature], shape) or ()
        return transforms


def _check_finite(features: NDArray[np.float32]) -> None:
    finite = np.isfinite(features).reshape(len(features), prod(features.shape[1:]))
    wrong = np.flatnonzero(~finite.all(axis=1))
    if wrong.size:
        raise DataError(
            f"model.features: the features of {wrong.size} of {len(features)} examples are no "
            f"finite float32 numbers, first of example {wrong[0]}; change the constants"
        )


class FeatureModel(nn.Module):
    """A model that first applies fixed transforms to its inputs; no gradient flows through them.

    Args:
        features: the fixed transforms.
        model: the model that takes the features (n, ...).
    """

    def __init__(self, features: FeaturePipeline, model: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs for inputs (n, ...), shaped as the dataset's examples.

        Raises:
            ModelError: a transform cannot be applied to inputs of that shape.
            DataError: a feature is not a finite number.
        """
        numbers = x.detach().to("cpu", torch.float32).contiguous().numpy()
        return self.model(torch.from_numpy(self.features(numbers)).to(x.device))

"""Shape of an example after each transform, from its shape before, without data."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from fedsim.core.limits import MAX_PARAMETERS
from fedsim.models.catalog import ModelError
from fedsim.models.features.settings import (
    FeatureSettings,
    OrientationSettings,
    RandomFourierSettings,
    ScatteringSettings,
    StandardizeSettings,
)

Shape = tuple[int, ...]


class FeatureShapeError(ModelError):
    """A transform does not take examples of a shape.

    Args:
        position: place of the transform in `model.features`.
        name: name of the transform.
        reason: what it takes, and what it got.
    """

    def __init__(self, position: int, name: str, reason: str) -> None:
        super().__init__(f"model.features.{position}: {name} {reason}")
        self.position = position
        self.reason = f"{name} {reason}"


def shape_after(features: Sequence[FeatureSettings], shape: Shape | None) -> Shape | None:
    """Return the shape of one example after all transforms.

    Args:
        features: the transforms, in order.
        shape: shape of one example before; None: not known yet.

    Returns:
        The shape, or None where it depends on an unknown shape.

    Raises:
        FeatureShapeError: a transform does not take the shape that it would get.
    """
    for position, one in enumerate(features):
        if shape is None and one.name not in _FIXED:
            continue
        try:
            shape = _SHAPES[one.name](one.value, shape or ())
        except ValueError as error:
            raise FeatureShapeError(position, one.name, str(error)) from error
    return shape


def _same(value: Any, shape: Shape) -> Shape:
    return shape


def _centered(value: float | list[float] | str, shape: Shape) -> Shape:
    return _constants("center", value, shape)


def _standardized(value: StandardizeSettings, shape: Shape) -> Shape:
    return _constants("std", value.std, _constants("mean", value.mean, shape))


def _constants(what: str, value: object, shape: Shape) -> Shape:
    if isinstance(value, list) and len(value) != shape[0]:
        raise ValueError(
            f"has {len(value)} constants for {what}, and examples of shape {shape} have "
            f"{shape[0]} columns or channels; give one number, or one for each"
        )
    return shape


def _oriented(value: OrientationSettings, shape: Shape) -> Shape:
    *_, height, width = image_shape(shape)
    if min(height, width) < value.window:
        raise ValueError(
            f"has windows of {value.window} pixels, and examples of shape {shape} have "
            f"{min(height, width)}; lower window"
        )
    rows, columns = (1 + (side - value.window) // value.stride for side in (height, width))
    return prod(shape[:-2]) * value.bins, rows, columns


def _scattered(value: ScatteringSettings, shape: Shape) -> Shape:
    *_, height, width = image_shape(shape)
    step = 2**value.scales
    if min(height, width) < step:
        raise ValueError(
            f"averages over {step} x {step} pixels, and examples of shape {shape} have "
            f"{min(height, width)}; lower scales"
        )
    return prod(shape[:-2]) * value.paths, -(-height // step), -(-width // step)


def image_shape(shape: Shape) -> Shape:
    """Return the shape of an image, (height, width) or (channels, height, width).

    Raises:
        ValueError: it is no shape of an image.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < 2:
        raise ValueError(
            "takes images of shape (height, width) or (channels, height, width), with at least 2 "
            f"pixels each way, got examples of shape {shape}; place it before transforms that "
            "flatten, or return images from your dataset function"
        )
    return shape


def _random(value: RandomFourierSettings, shape: Shape) -> Shape:
    values = prod(shape) * value.dim
    if values > MAX_PARAMETERS:
        raise ValueError(
            f"would hold {values:,} random numbers for examples of shape {shape}, and at most "
            f"{MAX_PARAMETERS:,} fit; lower dim"
        )
    return (value.dim,)


_FIXED = {"random_fourier"}  # their shape follows from their settings alone
_SHAPES: Mapping[str, Callable[[Any, Shape], Shape]] = {
    "center": _centered,
    "unit_norm": _same,
    "log": _same,
    "standardize": _standardized,
    "orientations": _oriented,
    "random_fourier": _random,
    "scattering": _scattered,
}

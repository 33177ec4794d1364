"""Settings of the model, its adapters, its loss and the transforms of its features."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fedsim.core.limits import MAX_PARAMETERS, MAX_WIDTH
from fedsim.core.names import closest_hint
from fedsim.core.settings import MAY_BE_OBJECT, Settings
from fedsim.models.catalog import ModelError

_NEEDS_DATA = "is computed from the data of several clients, which no ε of this experiment covers"
_REFUSED = {
    name: f"{name} {_NEEDS_DATA}; use transforms of one example, or public constants"
    for name in (
        *("pca", "whiten", "whitening", "zca", "lda", "normalize", "normalise", "min_max"),
        *("minmax", "quantile", "rank", "impute", "batch_norm", "select", "kmeans"),
    )
} | {"orientations": "orientations is now named hog; write hog"}


def _constants(value: Any) -> float | list[float]:
    """Return a number, or a list of numbers."""
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) and value else [value]
    if not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
    ):
        raise ValueError("must be a public number, or a list of numbers with one for each column")
    if not all(isfinite(number) for number in numbers):
        raise ValueError("must be a finite number")
    floats = [float(number) for number in numbers]
    return floats if isinstance(value, list | tuple) else floats[0]


def _center(value: Any) -> float | list[float] | str:
    return value if value == "own" else _constants(value)


def _scales(value: Any) -> float | list[float]:
    scales = _constants(value)
    if min(scales if isinstance(scales, list) else [scales]) <= 0:
        raise ValueError("must be > 0")
    return scales


_NUMBERS: dict[str, Any] = {
    "anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]
}
_OWN: dict[str, Any] = {"anyOf": [{"const": "own"}, *_NUMBERS["anyOf"]]}
Center = Annotated[float | list[float] | str, PlainValidator(_center), WithJsonSchema(_OWN)]
Constants = Annotated[float | list[float], PlainValidator(_constants), WithJsonSchema(_NUMBERS)]
Scales = Annotated[float | list[float], PlainValidator(_scales), WithJsonSchema(_NUMBERS)]


class NoSettings(Settings):
    """Empty settings, for a transform that has no options."""


class StandardizeSettings(Settings):
    """Settings of the transform `standardize`: the public constants in (x - mean) / std."""

    mean: Constants = Field(
        default=0.0, description="public mean: one number, or one for each column or channel"
    )
    std: Scales = Field(
        default=1.0, description="public scale: one number, or one for each column or channel"
    )


class HogSettings(Settings):
    """Settings of the transform `hog`: maps of gradient orientations of an image."""

    bins: int = Field(default=8, ge=2, le=64, description="directions over the full circle")
    window: int = Field(default=3, ge=1, le=64, description="side of a pooling window, in pixels")
    stride: int = Field(default=1, ge=1, le=64, description="pixels between windows")
    power: float = Field(
        default=0.5, gt=0, le=1, description="exponent of each pooled value; 0.5 is the square root"
    )


class ScatteringSettings(Settings):
    """Settings of the transform `scattering`: wavelets and averages of an image."""

    scales: int = Field(default=2, ge=1, le=6, description="J: averages over 2^J x 2^J pixels")
    directions: int = Field(default=8, ge=1, le=32, description="L: directions of the wavelets")
    layers: int = Field(default=2, ge=1, le=2, description="wavelet transforms on a path")

    @property
    def paths(self) -> int:
        """Number of wavelet paths of one channel: 1 + J L, plus L² J (J - 1) / 2 with two layers.

        A path is a sequence of at most two wavelets. J is the number of scales and L the number of
        directions.
        """
        pairs = self.scales * (self.scales - 1) // 2 if self.layers == 2 else 0
        return 1 + self.scales * self.directions + pairs * self.directions**2


class RandomFourierSettings(Settings):
    """Settings of `random_fourier`: features of the Gaussian kernel exp(-gamma ||x - y||²)."""

    dim: int = Field(default=512, ge=1, le=MAX_WIDTH, description="number of features")
    gamma: float = Field(gt=0, description="inverse squared width of the kernel")
    seed: int = Field(default=0, ge=0, lt=2**63, description="public seed of the random directions")


def _refuse_fit(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(
            f"{value!r} {_NEEDS_DATA}; give public constants: standardize: {{mean: 0.3, std: 0.2}}"
        )
    return value


class FeatureSettings(Settings):
    """One transform of `model.features`, written as a name or a mapping: `{center: 0.3}`."""

    center: Center | None = Field(
        default=None,
        description="subtract a public constant, one number or one for each column or channel; "
        "own: the mean of the example's own values",
    )
    unit_norm: NoSettings | None = Field(
        default=None, description="divide by the example's L2 norm; an example of zeros stays"
    )
    log: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="sign(x) log(1 + |x| / scale) with a public scale; the name alone sets 1",
    )
    standardize: Annotated[StandardizeSettings | None, BeforeValidator(_refuse_fit)] = Field(
        default=None, description="(x - mean) / std with public constants"
    )
    hog: HogSettings | None = Field(
        default=None, description="gradients of an image, divided among directions and pooled"
    )
    random_fourier: RandomFourierSettings | None = Field(
        default=None, description="sqrt(2 / dim) cos(x W + b), W and b from a public seed"
    )
    scattering: ScatteringSettings | None = Field(
        default=None, description="moduli of an image's wavelet transforms, averaged; two layers"
    )

    @property
    def name(self) -> str:
        """Name of the transform."""
        return next(name for name, value in self if value is not None)

    @property
    def value(self) -> Any:
        """Argument of the transform: a constant, or a settings object."""
        return getattr(self, self.name)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        """Turn a name into a mapping, and refuse transforms that are computed from the data."""
        for name in (
            (value,) if isinstance(value, str) else value if isinstance(value, dict) else ()
        ):
            if name in _REFUSED:
                raise ValueError(_REFUSED[name])
        if not isinstance(value, str):
            return value
        if value in _ALONE:
            return {value: _ALONE[value]}
        if value in cls.model_fields:
            raise ValueError(f"{value} needs its settings: {{{value}: ...}}")
        hint = closest_hint(value, cls.model_fields, f"one of {', '.join(cls.model_fields)}")
        raise ValueError(f"no transform is named {value[:60]!r}; {hint}")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(
                f"an item of the list names one transform, got {names}; write one item for "
                "each transform"
            )
        return self

    @model_serializer
    def _short(self) -> Any:
        value = self.value
        if isinstance(value, NoSettings):
            return self.name
        return {self.name: value.model_dump() if isinstance(value, Settings) else value}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mapping = {**handler.resolve_ref_schema(handler(schema))}
        mapping |= {"minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": list(_ALONE)}, mapping]}


# Transforms that may be written as a name alone, with their value.
_ALONE: dict[str, object] = {"unit_norm": {}, "log": 1.0, "hog": {}, "scattering": {}}

FEATURES: dict[str, str] = {
    name: field.description or "" for name, field in FeatureSettings.model_fields.items()
}
"""The descriptions of all transforms, by name."""


Shape = tuple[int, ...]


class FeatureShapeError(ModelError):
    """Raised if a transform cannot be applied to examples of the given shape.

    Args:
        position: index of the transform in `model.features`.
        name: name of the transform.
        reason: text with the shapes that the transform takes and the shape that it got.
    """

    def __init__(self, position: int, name: str, reason: str) -> None:
        super().__init__(f"model.features.{position}: {name} {reason}")
        self.position = position
        self.reason = f"{name} {reason}"


def shape_after(features: Sequence[FeatureSettings], shape: Shape | None) -> Shape | None:
    """Return the shape of one example after all transforms.

    Args:
        features: the transforms, in order.
        shape: shape of one example before the transforms; None if it is unknown.

    Returns:
        The shape; None if it depends on the unknown shape.

    Raises:
        FeatureShapeError: a transform cannot be applied to the shape that it would get.
    """
    for position, feature in enumerate(features):
        if shape is None and feature.name not in _FIXED:
            continue
        try:
            shape = _SHAPES[feature.name](feature.value, shape or ())
        except ValueError as error:
            raise FeatureShapeError(position, feature.name, str(error)) from error
    return shape


def _same(value: Any, shape: Shape) -> Shape:
    return shape


def _centered(value: float | list[float] | str, shape: Shape) -> Shape:
    return _fitting("center", value, shape)


def _standardized(value: StandardizeSettings, shape: Shape) -> Shape:
    return _fitting("std", value.std, _fitting("mean", value.mean, shape))


def _fitting(setting: str, value: object, shape: Shape) -> Shape:
    if isinstance(value, list) and len(value) != shape[0]:
        raise ValueError(
            f"has {len(value)} constants for {setting}, and examples of shape {shape} have "
            f"{shape[0]} columns or channels; give one number, or one for each"
        )
    return shape


def _oriented(value: HogSettings, shape: Shape) -> Shape:
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
    """Return a shape after checking that it is (height, width) or (channels, height, width).

    Raises:
        ValueError: the shape is not that of an image.
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
    "hog": _oriented,
    "random_fourier": _random,
    "scattering": _scattered,
}


class LoraSettings(Settings):
    """The section `model.lora` of an experiment file: low-rank adapters on frozen layers."""

    rank: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(
        default=4, description="r, the rank of each adapter"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="an adapter's output is scaled by alpha / rank; null sets alpha to the rank",
    )
    targets: list[str] = Field(
        default=["*"],
        min_length=1,
        description="patterns of the names of linear, embedding and convolution layers that get an "
        "adapter, such as blocks.*.query",
    )
    save: Literal["merged", "adapters"] = Field(
        default="merged",
        description="content of model.safetensors: merged, the whole model with the adapters added "
        "to its weights; adapters, only the trained values, which need model.init to be loaded",
    )

    @property
    def scale(self) -> float:
        """Factor by which an adapter's output is multiplied: alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ModelSettings(Settings):
    """Settings of the section `model` of an experiment file: model, adapters and loss."""

    name: Annotated[str, MAY_BE_OBJECT] = Field(
        description="a built-in name, package.module:callable, or ./file.py:callable"
    )
    args: dict[str, Any] = Field(default={}, description="arguments of the model's callable")
    features: list[FeatureSettings] = Field(
        default=[],
        description="fixed transforms of each example before training, in order; each is a "
        "function of one example and public constants",
    )
    init: str | None = Field(
        default=None,
        description="file.safetensors with public initial weights, relative to the experiment "
        "file; null draws them from the seed",
    )
    freeze: list[str] = Field(
        default=[],
        description="patterns of names of frozen parameters, such as 0.*: no gradient, "
        "no noise, no update",
    )
    train: list[str] = Field(
        default=[],
        description="patterns of parameter names, such as head.*, that are trained; all others are "
        "frozen, and no message carries them",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="low-rank adapters on frozen layers: only they and the parameters of `train` "
        "are trained and sent; null adds none",
    )
    loss: Annotated[str, MAY_BE_OBJECT] = Field(
        default="cross_entropy",
        description="cross_entropy, mse, bce, or package.module:callable / ./file.py:callable "
        "that returns one value per example",
    )

    @property
    def has_local_base(self) -> bool:
        """Whether only trained values are sent; server and clients then build the frozen ones."""
        return bool(self.train) or self.lora is not None

    @property
    def public_parts(self) -> dict[str, Any] | None:
        """Those of `features`, `init`, `freeze`, `train` and `lora` that are set, by name.

        The value of `features` is the transforms' names, and that of `lora` is its targets. Without
        any of the settings the result is None.
        """
        parts = {
            "features": [feature.name for feature in self.features],
            "init": self.init,
            "freeze": self.freeze,
            "train": self.train,
            "lora": None if self.lora is None else self.lora.targets,
        }
        return {name: part for name, part in parts.items() if part} or None

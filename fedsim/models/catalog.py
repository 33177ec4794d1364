"""Catalogue of the built-in models and losses, importable without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedsim.core.errors import InputError
from fedsim.core.limits import MAX_LAYERS, MAX_WIDTH
from fedsim.core.settings import Settings


class ModelError(InputError):
    """Raised if model, loss and data do not fit together; the message is one line with the fix."""


class MetricError(InputError):
    """Raised if a metric does not fit the task or fails; the message is one line with the fix."""


Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


class LogisticArgs(Settings):
    """Settings `model.args` of model `logistic`."""

    bias: bool = Field(default=True, description="whether the layer has a bias")
    init: Literal["default", "zeros"] = Field(
        default="default",
        description="initial weights: uniform, drawn from the seed; or zeros, the better start of "
        "private training with few rounds",
    )


class MlpArgs(Settings):
    """Settings `model.args` of model `mlp`."""

    hidden: list[Width] = Field(
        default=[32], min_length=1, max_length=MAX_LAYERS, description="width of each hidden layer"
    )
    activation: Literal["relu", "tanh"] = Field(
        default="relu", description="activation between the layers"
    )


class CnnArgs(Settings):
    """Settings `model.args` of model `cnn`."""

    channels: list[Width] = Field(
        default=[16, 32],
        min_length=1,
        max_length=MAX_LAYERS,
        description="output channels of each convolution",
    )
    hidden: Width = Field(default=32, description="width of the layer after the convolutions")
    activation: Literal["relu", "tanh"] = Field(
        default="tanh", description="activation between the layers"
    )


@dataclass(frozen=True)
class ModelEntry:
    """Catalogue entry of a built-in model.

    Attributes:
        description: the model's line in `fedsim list`.
        args: the settings class for `model.args` of the model.
    """

    description: str
    args: type[Settings]


MODELS = {
    "logistic": ModelEntry("one linear layer on the flattened input", LogisticArgs),
    "mlp": ModelEntry("fully connected layers on the flattened input", MlpArgs),
    "cnn": ModelEntry("convolutions with group norm for images (channels, height, width)", CnnArgs),
}

LOSSES = {
    "cross_entropy": "classification: one score per class, integer targets",
    "mse": "regression: squared error, averaged over the outputs of an example",
    "bce": "binary or multi-label: one logit per label, targets 0 or 1",
}

# Means over examples, which can be averaged over clients; R² cannot.
TRAIN_METRICS = ("train_loss", "train_accuracy", "train_mse")

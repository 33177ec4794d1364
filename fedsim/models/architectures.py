"""The built-in models: logistic regression, fully connected and convolutional networks.

No model has BatchNorm, because BatchNorm mixes the examples of a batch, so that no per-example
gradient exists. No model has dropout, because dropout draws from torch's global generator.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from fedsim.core.limits import MAX_PARAMETERS
from fedsim.core.settings import Settings
from fedsim.models.catalog import CnnArgs, LogisticArgs, MlpArgs, ModelError

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def architecture(args: Settings, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return the built-in model that the setting `model.args` describes.

    The model maps (batch, *input_shape) to (batch, num_outputs).

    Args:
        args: the setting `model.args`; its class selects the model.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.

    Raises:
        ModelError: the model does not accept inputs of that shape, or has more than
            `MAX_PARAMETERS` trained values.
    """
    build = _BUILT_IN[type(args)]
    with torch.device("meta"):  # shapes without memory
        values = sum(value.numel() for value in build(args, input_shape, num_outputs).parameters())
    if values > MAX_PARAMETERS:
        raise ModelError(
            f"model.args: a model of {values:,} trained values for inputs of shape {input_shape} "
            f"and {num_outputs:,} outputs; built-in models have at most {MAX_PARAMETERS:,}: use "
            "smaller layers, fewer classes or a model of your own"
        )
    return build(args, input_shape, num_outputs)


def logistic(args: LogisticArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of one linear layer on the flattened input.

    Args:
        args: the setting `model.args` of model `logistic`.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.
    """
    layer = nn.Linear(prod(input_shape), num_outputs, bias=args.bias)
    if args.init == "zeros":
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(args: MlpArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of fully connected layers on the flattened input.

    Args:
        args: the setting `model.args` of model `mlp`.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(input_shape)
    for hidden in args.hidden:
        layers += [nn.Linear(width, hidden), _ACTIVATIONS[args.activation]()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_outputs))


def cnn(args: CnnArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of 3 x 3 convolutions with group norm and pooling, then one hidden layer.

    Args:
        args: the setting `model.args` of model `cnn`.
        input_shape: shape of one example, (channels, height, width) in pixels.
        num_outputs: number of outputs per example.

    Raises:
        ModelError: the input shape does not have three dimensions.
    """
    if len(input_shape) != 3:
        raise ModelError(
            "model.name: cnn takes images of shape (channels, height, width), got examples of "
            f"shape {input_shape}; {_fix(input_shape)}, or use mlp"
        )
    activation = _ACTIVATIONS[args.activation]
    width, height_px, width_px = input_shape
    layers: list[nn.Module] = []
    for channels in args.channels:
        layers += [
            nn.Conv2d(width, channels, kernel_size=3, padding=1),
            nn.GroupNorm(_groups(channels), channels),
            activation(),
        ]
        width = channels
        # Pooling stops at 2 x 2: group norm of a single pixel would leave little of the image.
        if min(height_px, width_px) >= 4:
            layers.append(nn.MaxPool2d(2))
            height_px, width_px = height_px // 2, width_px // 2
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(width * height_px * width_px, args.hidden),
        activation(),
        nn.Linear(args.hidden, num_outputs),
    )


def _fix(input_shape: tuple[int, ...]) -> str:
    grey = "write data.images: {channels: none} if they are grey images"
    return grey if len(input_shape) == 2 else "give features (n, channels, height, width)"


def _groups(channels: int) -> int:
    """Return the largest number, at most 8, of equal groups with 4 or more channels each."""
    return max(n for n in range(1, max(1, min(8, channels // 4)) + 1) if channels % n == 0)


_BUILT_IN: Mapping[type[Settings], Callable[[Any, tuple[int, ...], int], nn.Module]] = {
    LogisticArgs: logistic,
    MlpArgs: mlp,
    CnnArgs: cnn,
}

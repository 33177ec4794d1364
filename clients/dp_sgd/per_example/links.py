"""What each known kind of layer is in a chain: a link with parameters, or a function, or both."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from fedsim.clients.dp_sgd.per_example.functions import (
    Flatten,
    Function,
    GroupNorm,
    Identity,
    MaxPool2d,
    Relu,
    Sigmoid,
    Tanh,
)
from fedsim.clients.dp_sgd.per_example.interface import UncoveredParameterError
from fedsim.clients.dp_sgd.per_example.layers import AffineUse, ConvolutionUse, LinearUse
from fedsim.clients.dp_sgd.per_example.layers.base import Use


class Running(Protocol):
    """A use, or the like of one, as a chain runs it."""

    input: Tensor
    output_gradient: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        ...

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        ...


class Layer:
    """A link with parameters.

    Args:
        module: whose parameters they are.
        use: makes its use from the indices of weight and bias, None for one that is not trained.
        dimensions: that an input must have; None: any.

    Attributes:
        channels_last: whether a convolution has its channels in the last place of memory.
    """

    def __init__(
        self,
        module: nn.Module,
        use: Callable[[int | None, int | None], Use],
        dimensions: int | None = None,
    ) -> None:
        self.module, self._make, self._dimensions = module, use, dimensions
        self.channels_last = False

    def use(self, index: Mapping[int, int], dimensions: int) -> Use:
        """Return a use of the layer on an input with so many dimensions.

        Raises:
            UncoveredParameterError: on such an input the layer does something else.
        """
        weight, bias = (index.get(id(p)) for p in pair(self.module))
        if self._dimensions not in (None, dimensions):
            found = tuple(i for i in (weight, bias) if i is not None)
            raise UncoveredParameterError("a convolution needs one row per example", found)
        made = self._make(weight, bias)
        if isinstance(made, ConvolutionUse):
            made.channels_last = self.channels_last
        return made


Link = Layer | Function


def pair(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return the weight and the bias of a layer, None for one that it has not."""
    found: Any = module._parameters
    return found.get("weight"), found.get("bias")


def _linear(module: nn.Linear) -> list[Link]:
    def use(weight: int | None, bias: int | None) -> Use:
        return LinearUse(weight, bias, module.weight.detach(), _detached(module.bias))

    return [Layer(module, use)]


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[Link] | None:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    geometry: dict[str, Any] = {
        "stride": list(module.stride),
        "padding": list(module.padding),
        "dilation": list(module.dilation),
        "groups": module.groups,
    }

    def use(weight: int | None, bias: int | None) -> Use:
        w, b = module.weight.detach(), _detached(module.bias)
        return ConvolutionUse(weight, bias, w, b, **geometry)

    return [Layer(module, use, module.weight.ndim)]


def _group_norm(module: nn.GroupNorm) -> list[Link]:
    if not module.affine:
        return [GroupNorm(module)]

    def use(weight: int | None, bias: int | None) -> Use:
        w, b = (p.detach().reshape(-1, 1, 1) for p in (module.weight, module.bias))
        return AffineUse(weight, bias, w, b, module.weight.shape)

    return [GroupNorm(module), Layer(module, use, 4)]


def _flatten(module: nn.Flatten) -> list[Link] | None:
    return [Flatten()] if (module.start_dim, module.end_dim) == (1, -1) else None


def _max_pool(module: nn.MaxPool2d) -> list[Link] | None:
    return None if module.return_indices else [MaxPool2d(module)]


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


# Exactly these types: a subclass may do anything.
LINKS: dict[type[nn.Module], Callable[[Any], list[Link] | None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _flatten,
    nn.MaxPool2d: _max_pool,
    nn.Identity: lambda _: [Identity()],
    nn.ReLU: lambda _: [Relu()],
    nn.Tanh: lambda _: [Tanh()],
    nn.Sigmoid: lambda _: [Sigmoid()],
}

"""Operations without parameters, forwards and backwards by hand, as torch does them to the bit."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.per_example.layers.channels_last import channels_last

_aten = torch.ops.aten
MANY_CHANNELS = 16  # a vector of AVX-512


class Function(Protocol):
    """A link without parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        ...

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        """Return the gradient with respect to the input."""
        ...


class Identity:
    """nn.Identity."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        return x, None

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        """Return the gradient with respect to the input."""
        return g


class Flatten:
    """All dimensions but the first as one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        return x.flatten(1), x.shape

    def backward(self, g: Tensor, kept: torch.Size) -> Tensor:
        """Return the gradient with respect to the input."""
        return g.reshape(kept)


class Relu:
    """max(x, 0)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        y = torch.relu(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return _aten.threshold_backward.default(g, kept, 0)


class Tanh:
    """tanh x."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        y = torch.tanh(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return _aten.tanh_backward.default(g, kept)


class Sigmoid:
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        y = torch.sigmoid(x)
        return y, y

    def backward(self, g: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return _aten.sigmoid_backward.default(g, kept)


class MaxPool2d:
    """The largest value of each window.

    Attributes:
        channels_last: whether the output, if it has many channels, has them in the last place of
            memory.
    """

    def __init__(self, module: nn.MaxPool2d) -> None:
        stride = module.kernel_size if module.stride is None else module.stride
        self._options: tuple[Any, ...] = (
            _two(module.kernel_size),
            _two(stride),
            _two(module.padding),
            _two(module.dilation),
            module.ceil_mode,
        )
        self.channels_last = False

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        if x.ndim == 4 and x.shape[1] >= MANY_CHANNELS and x.device.type == "cpu":
            # torch's kernel for this order compares all channels at once, the other one number by
            # number with a branch that nothing predicts: with all copies a fifth of the time.
            last = channels_last(x)
            y, places = _aten.max_pool2d_with_indices.default(last, *self._options)
            # Backwards, gradients have the order that the layer before has.
            x, places = (x, places.contiguous()) if x.is_contiguous() else (last, places)
            return y if self.channels_last else y.contiguous(), (x, places)
        y, places = _aten.max_pool2d_with_indices.default(x, *self._options)
        return y, (x, places)

    def backward(self, g: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        """Return the gradient with respect to the input."""
        x, places = kept
        return _aten.max_pool2d_with_indices_backward.default(g, x, *self._options, places)


class GroupNorm:
    """Without its scale and shift."""

    def __init__(self, module: nn.GroupNorm) -> None:
        self._groups, self._eps = module.num_groups, module.eps

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output, and what `backward` needs of this pass."""
        x = x.contiguous()
        n, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
        shape = (n, channels, size, self._groups)
        y, mean, scale = _aten.native_group_norm.default(x, None, None, *shape, self._eps)
        return y, (x, mean, scale, shape)

    def backward(self, g: Tensor, kept: Any) -> Tensor:
        """Return the gradient with respect to the input."""
        x, mean, scale, shape = kept
        wanted = [True, False, False]
        g = g.contiguous()
        return _aten.native_group_norm_backward.default(g, x, mean, scale, None, *shape, wanted)[0]


def _two(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)

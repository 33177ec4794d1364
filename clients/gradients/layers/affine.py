"""Per-example gradients of scales and shifts, which are the parameters of normalisation layers."""

import torch
from torch import Tensor

from fedsim.clients.gradients.layers.base import LayerUse, Operand


class AffineUse(LayerUse):
    """One call of a scale w and a shift b on an input x: the output is x · w + b.

    w and b have shape (d...), and x has shape (n, ..., d..., *after).

    Args:
        weight: the scale w; with None, the scale is 1.
        bias: the shift b; with None, the shift is 0.
        dimensions: number of dimensions in `after`, such as 2 for images with channels first.
    """

    def __init__(self, weight: Operand | None, bias: Operand | None, dimensions: int = 0) -> None:
        super().__init__(weight, bias)
        self._after = dimensions

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, ...) for the input x (n, ...)."""
        rows = x.unflatten(0, (self.clients, -1))
        w, b = (None if p is None else self._spread(p.values, x) for p in (self.weight, self.bias))
        if w is None:
            y = rows.clone() if b is None else rows + b
        else:
            y = rows * w if b is None else torch.addcmul(b, rows, w)
        return y.flatten(0, 1)

    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the layer's input, given the gradient g at its output."""
        if self.weight is None:
            return g
        rows = g.unflatten(0, (self.clients, -1))
        return (rows * self._spread(self.weight.values, g)).flatten(0, 1)

    def compute(self, index: int) -> Tensor:
        """Return the per-example gradients (n, *shape) of the parameter with the given index."""
        g = self.output_gradient
        values = g * self.input if index == self.weight_index else g
        last = g.ndim - self._after
        first = last - (self.operand.values.ndim - 1)
        summed = [*range(1, first), *range(last, g.ndim)]
        return values.sum(summed) if summed else values

    def _spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Return values (K, d...) in a shape that broadcasts over (K, R, ..., d..., after)."""
        shape = values.shape[1:]
        before = x.ndim - self._after - len(shape)
        return values.reshape(len(values), *[1] * before, *shape, *[1] * self._after)

"""Convolutions: the weights are small, so each example's gradient is held."""

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.uses.base import MaterialisedUse


class ConvolutionUse(MaterialisedUse):
    """A convolution in 1, 2 or 3 dimensions with stride, padding, dilation and groups."""

    def __init__(
        self,
        weight: int | None,
        bias: int | None,
        w: Tensor,
        b: Tensor | None,
        *,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> None:
        super().__init__(weight, bias, w, b)
        self._w = w
        self.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return torch.convolution(x, self._w, self.b, *self.geometry)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        return torch.ops.aten.convolution_backward(
            g, x, self._w, None, *self.geometry, [True, False, False]
        )[0]

    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of one parameter."""
        if index == self.bias:
            return self.output_gradient.flatten(2).sum(2)
        a, g, n = self.input, self.output_gradient, len(self.input)
        *options, groups = self.geometry
        # Examples become groups of one convolution: one call for the gradients of all.
        stacked = torch.ops.aten.convolution_backward(
            g.reshape(1, -1, *g.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            # Only its shape is read: no gradient of the input is asked for.
            self._w.new_empty(1).expand(n * len(self._w), *self._w.shape[1:]),
            None,
            *options,
            n * groups,
            [False, True, False],
        )[1]
        return stacked.view(n, *self._w.shape)

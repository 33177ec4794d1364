"""Convolutions: the weights are small, so each example's gradient is held."""

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.uses.base import MaterialisedUse
from fedsim.clients.dp_sgd.uses.norms import BUDGET


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
        if self._has_few_patches():
            return self._from_patches()
        a, g, n = self.input, self.output_gradient, len(self.input)
        *options, groups = self.geometry
        # Examples become groups of one convolution: one call for the gradients of all.
        stacked = torch.ops.aten.convolution_backward(
            g.reshape(1, -1, *g.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            # Only its shape is read: no gradient of the input is asked for. (An expanded tensor
            # would be made contiguous first; memory that nobody touches costs nothing.)
            self._w.new_empty(n * len(self._w), *self._w.shape[1:]),
            None,
            *options,
            n * groups,
            [False, True, False],
        )[1]
        return stacked.view(n, *self._w.shape)

    def _has_few_patches(self) -> bool:
        """Tell whether copying out all patches is faster than one grouped convolution.

        Measured on x86-64: 1.05 to 1.8 times for images of 1 or 3 channels, and slower from 16 on.
        """
        g, w = self.output_gradient, self._w
        few = w.ndim == 4 and w.shape[1] <= 4 and self.geometry[-1] == 1
        return few and g.shape[0] * w[0].numel() * g.shape[2:].numel() <= BUDGET

    def _from_patches(self) -> Tensor:
        """Return the weight's gradients: for each example g times its patches, transposed."""
        (down, right), (top, left), (apart, across), *_ = self.geometry
        a, g = self.input, self.output_gradient
        a = functional.pad(a, (left, left, top, top)) if top or left else a.contiguous()
        kernel, size = self._w.shape[1:], g.shape[2:]
        example, channel, row, column = a.stride()
        patches = a.as_strided(
            (a.shape[0], *kernel, *size),
            (example, channel, row * apart, column * across, row * down, column * right),
        )
        flat = patches.reshape(a.shape[0], kernel.numel(), size.numel())
        return (g.flatten(2) @ flat.transpose(1, 2)).view(a.shape[0], *self._w.shape)

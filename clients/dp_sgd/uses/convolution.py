"""Convolutions: the weights are small, so each example's gradient is held."""

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.uses.base import MaterialisedUse

# Elements made at once. Freshly allocated memory costs more than computing on it (a page fault for
# each 4 kB); blocks of 512 kB come back from the allocator's own stock.
_BLOCK = 1 << 17


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
        self.geometry: tuple[list[int], list[int], list[int], bool, list[int], int]
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
        a, g = self.input, self.output_gradient
        if index == self.bias:
            return g.flatten(2).sum(2)
        n, shape = g.shape[0], self._w.shape
        result = g.new_empty(n, *shape) if self.workspace is None else self.workspace(index, n, g)
        fill, size = self._fill_by_group, self._w.numel()
        if self._has_few_channels():
            fill, size = self._fill_by_patch, self._w[0].numel() * g.shape[2:].numel()
        step = max(1, _BLOCK // size)
        for part in zip(result.split(step), a.split(step), g.split(step), strict=True):
            fill(*part)
        return result

    def _fill_by_group(self, into: Tensor, a: Tensor, g: Tensor) -> None:
        """One convolution whose groups are the examples (and the layer's groups in each)."""
        n, (*options, groups) = g.shape[0], self.geometry
        stacked = torch.ops.aten.convolution_backward(
            g.reshape(1, -1, *g.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            # Only its shape is read: no gradient of the input is asked for. (An expanded tensor
            # would be made contiguous first; memory that nobody touches costs nothing.)
            self._w.new_empty(n * self._w.shape[0], *self._w.shape[1:]),
            None,
            *options,
            n * groups,
            [False, True, False],
        )[1]
        into.copy_(stacked.view_as(into))

    def _has_few_channels(self) -> bool:
        """Tell whether copying out all patches is faster than a grouped convolution.

        Measured on x86-64: 1.05 to 1.8 times for images of 1 or 3 channels, and slower from 16 on.
        """
        return self._w.ndim == 4 and self._w.shape[1] <= 4 and self.geometry[-1] == 1

    def _fill_by_patch(self, into: Tensor, a: Tensor, g: Tensor) -> None:
        """For each example g times its patches, transposed."""
        (down, right), (top, left), (apart, across), *_ = self.geometry
        a = functional.pad(a, (left, left, top, top)) if top or left else a.contiguous()
        kernel, size = self._w.shape[1:], g.shape[2:]
        example, channel, row, column = a.stride()
        patches = a.as_strided(
            (a.shape[0], *kernel, *size),
            (example, channel, row * apart, column * across, row * down, column * right),
        )
        flat = patches.reshape(a.shape[0], kernel.numel(), size.numel())
        torch.bmm(g.flatten(2), flat.transpose(1, 2), out=into.flatten(2))

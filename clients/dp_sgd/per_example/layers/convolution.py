"""Convolutions: the weights are small, so each example's gradient is held."""

from typing import Self

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.layers.base import MaterialisedUse
from fedsim.clients.dp_sgd.per_example.layers.channels_last import Geometry, in_order
from fedsim.clients.dp_sgd.per_example.layers.convolving import (
    convolve,
    input_gradient,
    weight_gradient,
)
from fedsim.clients.dp_sgd.per_example.layers.patches import (
    has_few_channels,
    overlap_little,
    patches_of,
)

# Elements made at once. Freshly allocated memory costs more than computing on it (a page fault for
# each 4 kB); blocks of 512 kB come back from the allocator's own stock.
_BLOCK = 1 << 17
_FEW_PLACES = 64  # of an image: up to so many, grouped convolutions are slower than patches
_SLOW_TO_SORT = 64  # output channels: from so many on, sorting them costs more than patches


class ConvolutionUse(MaterialisedUse):
    """A convolution in 1, 2 or 3 dimensions with stride, padding, dilation and groups.

    Attributes:
        channels_last: whether images are convolved with their channels in the last place of memory.
        patches: of the input, where the forward copied them out.
    """

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
        self.geometry: Geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        self.channels_last = False
        self.patches: Tensor | None = None

    def of_rows(self, rows: slice) -> Self:
        """Return the same use of some of the examples only; to be asked before anything else."""
        part = super().of_rows(rows)
        part.patches = None if self.patches is None else self.patches[rows]
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        last = self.channels_last
        y, patches = convolve(x, self._w, self.b, self.geometry, last=last)
        self.patches = patches if self.needs_input else None
        return y

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        return input_gradient(x, g, self._w, self.geometry, last=self.channels_last)

    def sum_of(self, index: int) -> Tensor:
        """Return Σ_i gradient_i, as a backward pass of torch does."""
        if index == self.bias:
            return self.output_gradient.flatten(2).sum((0, 2))
        if self.patches is not None:
            return self._sum_by_patches(self.patches)
        x, g = self.input, self.output_gradient
        return weight_gradient(x, g, self._w, self.geometry, last=self.channels_last)

    def _sum_by_patches(self, patches: Tensor) -> Tensor:
        g = self._sorted_gradient().flatten(2)
        out, channels, *kernel = self._w.shape
        if has_few_channels(self._w):  # few values, and no two examples' patches lie side by side
            return torch.bmm(g, patches).sum(0).view_as(self._w)
        total = g.transpose(1, 2).reshape(-1, out).t() @ patches.flatten(0, 1)
        return total.view(out, *kernel, channels).permute(0, 3, 1, 2).contiguous()

    def _sorted_gradient(self) -> Tensor:
        """Return the gradient at the output in the order of memory of the layer."""
        return in_order(self.output_gradient, self.geometry, last=self.channels_last)

    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of one parameter; one follows another in memory."""
        g = self._sorted_gradient()
        if index == self.bias:
            return g.flatten(2).sum(2)
        by_patches = self._has_quick_patches(g.shape[2:].numel())
        return self._by_patches(index, g) if by_patches else self._grouped(index, g)

    def _has_quick_patches(self, places: int) -> bool:
        """Tell whether copying out all patches is faster than a grouped convolution.

        Measured on x86-64 for 1 to 64 channels, kernels of 1 to 8 and images of 4 to 32 pixels: by
        patches takes 0.6 to 1.0 of the time where this is true, else up to 2.5 times as long.
        """
        if self._w.ndim != 4 or self.geometry[-1] > 1:
            return False
        if has_few_channels(self._w):
            return True
        if self._w.device.type != "cpu":
            return False
        sorting = self.channels_last and len(self._w) >= _SLOW_TO_SORT
        return sorting or places <= _FEW_PLACES or overlap_little(self._w, self.geometry)

    def _by_patches(self, index: int, g: Tensor) -> Tensor:
        """Return the weight's gradients: for each example g (out, places) times its patches."""
        out, taps, few = len(self._w), self._w[0].numel(), has_few_channels(self._w)
        wide = out >= taps  # the right side of a product should be the wide one
        held = self._room(index, g).view(-1, *((taps, out) if wide else (out, taps)))
        g = g.flatten(2)
        for rows in self._blocks(taps * g.shape[2]):
            patches = self.patches
            if patches is None:
                patches = patches_of(self.input[rows], self._w, self.geometry)
            left, right = g[rows], patches
            if wide:
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            torch.bmm(left, right, out=held[rows])
        axes = "chw" if few else "hwc"
        axes = f"{axes}o" if wide else f"o{axes}"
        sizes = dict(zip("ochw", self._w.shape, strict=True))
        held = held.view(-1, *(sizes[axis] for axis in axes))
        return held.permute(0, *(1 + axes.index(axis) for axis in "ochw"))

    def _blocks(self, size: int) -> list[slice]:
        """Return which examples' patches of so many values are multiplied together."""
        n = self.examples
        step = n if self.patches is not None else max(1, _BLOCK // size)
        return [slice(at, at + step) for at in range(0, n, step or 1)]

    def _grouped(self, index: int, g: Tensor) -> Tensor:
        """Return the weight's gradients by convolutions whose groups are examples."""
        result = self._room(index, g)
        step = max(1, _BLOCK // self._w.numel())
        parts = zip(result.split(step), self.input.split(step), g.split(step), strict=True)
        for part in parts:
            self._fill_by_group(*part)
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

    def _room(self, index: int, like: Tensor) -> Tensor:
        """Return (n, *shape) with any values."""
        if self.workspace is None:
            return like.new_empty(len(like), *self._w.shape)
        return self.workspace(index, len(like), like)

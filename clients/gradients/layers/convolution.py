"""Per-example gradients of convolutions, computed as products with image patches.

Convolution weights are small, so per-example gradients are held in memory. Images are stored with
channels last, where torch's pooling is five times as fast and the values of a patch are contiguous.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional, grad

from fedsim.clients.gradients.layers.base import (
    ROW_MULTIPLE,
    WHOLE,
    LayerUse,
    Operand,
    Part,
    Recorder,
    optional_operand,
    row_products,
)


@dataclass(frozen=True)
class Geometry:
    """Geometry of a convolution, with one entry for each dimension of an image.

    Attributes:
        kernel: size of the kernel.
        stride: distance between neighbouring patches, in pixels.
        dilation: distance between neighbouring kernel elements, in pixels.
        padding: pair with the number of zeros added before and after the image.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def pads(self) -> list[int]:
        """Padding argument of torch's `functional.pad`, for images (n, ..., channels)."""
        return [0, 0, *(side for sides in reversed(self.padding) for side in sides)]

    def places(self, padded: Sequence[int]) -> tuple[int, ...]:
        """Return the size of the output in each dimension.

        Args:
            padded: size of the padded image in each dimension.
        """
        dimensions = zip(padded, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((side - d * (k - 1) - 1) // s + 1 for side, k, s, d in dimensions)

    def taps(self, places: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield pairs of a kernel element's position and the slices of a padded image it reads.

        Args:
            places: size of the output in each dimension.
        """
        for tap in product(*map(range, self.kernel)):
            starts = (at * d for at, d in zip(tap, self.dilation, strict=True))
            seen = zip(starts, self.stride, places, strict=True)
            yield tap, tuple(slice(a, a + s * (p - 1) + 1, s) for a, s, p in seen)


class ConvolutionUse(LayerUse):
    """One call of a convolution in 1, 2 or 3 dimensions, without groups.

    Gradients of the parameters are matrix products with image patches. On the CPU, outputs and the
    gradients at inputs with many channels are computed by torch's convolutions, one client after
    the other. On other devices they are matrix products with image patches.
    """

    def __init__(self, weight: Operand, bias: Operand | None, geometry: Geometry) -> None:
        super().__init__(weight, bias)
        self._geometry = geometry
        k, out, channels = weight.values.shape[:3]
        by_taps = weight.values.movedim(2, -1).contiguous()
        self._matrix = by_taps.view(k, out, -1)  # (K, out, taps)
        self._kernels = by_taps.movedim(-1, 2).unbind()  # of each client, channels last
        self._channels, self._by_torch = channels, by_taps.device.type == "cpu"
        self._image: tuple[int, ...] = ()  # of the padded input

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, out, ...) for images x (n, channels, ...)."""
        last = self._padded(x)
        if self._by_torch:
            return self._for_each_client(last, _CONVOLUTIONS[last.ndim][0])
        shift = None if self.bias is None else self.bias.values
        rows, matrix = self.by_client(self._copy_patches(last)), self._matrix.transpose(1, 2)
        y = row_products(rows, matrix, shift)
        return y.view(len(x), *self._geometry.places(self._image), -1).movedim(-1, 1)

    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the layer's input, given the gradient g at its output."""
        if self._by_torch and self._channels >= _MANY_CHANNELS:
            at_input = self._torch_input_gradient(g).movedim(1, -1)
        else:
            at_input = self._add_taps(g)
        for dimension, (before, after) in enumerate(self._geometry.padding, start=1):
            size = at_input.shape[dimension] - before - after
            at_input = at_input.narrow(dimension, before, size)
        return at_input.movedim(-1, 1)

    def _for_each_client(self, last: Tensor, convolve: Callable[..., Tensor]) -> Tensor:
        """Return the convolutions of padded images (n, ..., channels), channels last in memory."""
        geometry, biases = self._geometry, [None] * self.clients
        if self.bias is not None:
            biases = list(self.bias.values)
        images = last.movedim(-1, 1).chunk(self.clients)
        clients = zip(images, self._kernels, biases, strict=True)
        outputs = [convolve(x, w, b, geometry.stride, 0, geometry.dilation) for x, w, b in clients]
        ordered = [y.movedim(1, -1) for y in outputs]
        whole = torch.cat(ordered) if len(outputs) > 1 else ordered[0].contiguous()
        return whole.movedim(-1, 1)

    def _torch_input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the padded input (n, channels, ...)."""
        geometry, gradient = self._geometry, _CONVOLUTIONS[g.ndim][1]
        size = (len(g) // self.clients, self._channels, *self._image)
        clients = zip(g.chunk(self.clients), self._kernels, strict=True)
        return torch.cat(
            [gradient(size, w, part, geometry.stride, 0, geometry.dilation) for part, w in clients]
        )

    def _add_taps(self, g: Tensor) -> Tensor:
        """Return the gradient at the padded input (n, ..., channels)."""
        geometry, places = self._geometry, g.shape[2:]
        at_patches = row_products(self.by_client(g.movedim(1, -1)), self._matrix)
        at_patches = at_patches.view(len(g), *places, *geometry.kernel, self._channels)
        at_input = g.new_zeros(len(g), *self._image, self._channels)
        skip = (slice(None),) * (1 + len(places))
        for tap, seen in geometry.taps(places):
            at_input[(slice(None), *seen)] += at_patches[(*skip, *tap)]
        return at_input

    def add_weighted(
        self, index: int, factors: Tensor | None, into: Tensor, part: Part = WHOLE
    ) -> None:
        """Add each client's weighted sum of gradients of a parameter to a tensor in place."""
        if factors is not None or index in self.held:
            super().add_weighted(index, factors, into, part)
            return
        g = self.by_client(self.output_gradient.movedim(1, -1))
        if index != self.weight_index:
            into += g.sum(1)
            return
        last = self._padded(self.input)
        # For kernels of size 1 with a stride, torch (2.13) writes outside its memory.
        if not self._by_torch or set(self._geometry.kernel) == {1}:
            total = torch.bmm(g.transpose(1, 2), self.by_client(self._copy_patches(last)))
            into += self.in_shape(total.flatten(1), index)
            return
        geometry, gradient = self._geometry, _CONVOLUTIONS[last.ndim][2]
        gs = self.output_gradient.chunk(self.clients)
        images = last.movedim(-1, 1).chunk(self.clients)
        for added, x, client_g in zip(into, images, gs, strict=True):
            added += gradient(x, added.shape, client_g, geometry.stride, 0, geometry.dilation)

    def compute(self, index: int) -> Tensor:
        """Compute the per-example gradients (n, size) of a parameter as flat rows.

        For the weight, the values of a row are in the order (output channel, kernel element, input
        channel).
        """
        g = self.output_gradient.movedim(1, -1).flatten(1, -2)  # (n, places, out)
        if index != self.weight_index:
            return g.sum(1)
        last, left = self._padded(self.input), g.transpose(1, 2)
        result = g.new_empty(len(g), g.shape[2], self._matrix.shape[2])
        for rows, has_example in self._row_blocks():
            if has_example:
                row_products(left[rows], self._copy_patches(last[rows]), into=result[rows])
            else:
                result[rows] = 0.0
        return result.flatten(1)

    def _row_blocks(self) -> Iterator[tuple[slice, bool]]:
        """Yield blocks of rows, all of one size, and whether a block has an example.

        The gradient of padding is 0, so a block of padding needs no product. Small blocks also fit
        into the cache. On a GPU one block of all rows is faster.
        """
        rows, weights = len(self.output_gradient), self.row_weights
        if weights is None or not self._by_torch or rows % ROW_MULTIPLE:
            yield slice(0, rows), True
            return
        for block, has_example in enumerate(weights.view(-1, ROW_MULTIPLE).any(1).tolist()):
            yield slice(block * ROW_MULTIPLE, (block + 1) * ROW_MULTIPLE), has_example

    def in_shape(self, rows: Tensor, index: int) -> Tensor:
        """Return gradients (m, size), ordered as by the method `rows`, in the parameter's shape."""
        if index != self.weight_index:
            return rows
        by_taps = rows.view(len(rows), -1, *self._geometry.kernel, self._channels)
        return by_taps.movedim(-1, 2)

    def _padded(self, x: Tensor) -> Tensor:
        """Return padded images (n, ..., channels) from images x (n, channels, ...)."""
        last = x.movedim(1, -1)
        if any(map(sum, self._geometry.padding)):
            last = functional.pad(last, self._geometry.pads)
        self._image = tuple(last.shape[1:-1])
        return last.contiguous()

    def _copy_patches(self, last: Tensor) -> Tensor:
        """Return the patches (n, places, taps) of padded images (n, ..., channels)."""
        geometry = self._geometry
        places = geometry.places(self._image)
        row, *steps, channel = last.stride()
        from_patch = [a * s for a, s in zip(steps, geometry.stride, strict=True)]
        from_tap = [a * d for a, d in zip(steps, geometry.dilation, strict=True)]
        size = (len(last), *places, *geometry.kernel, self._channels)
        windows = last.as_strided(size, (row, *from_patch, *from_tap, channel))
        return windows.reshape(len(last), torch.Size(places).numel(), -1)


_MANY_CHANNELS = 16
# Forwards, and the gradients at the input and the weight, by the dimensions of (n, channels, ...).
_CONVOLUTIONS: Mapping[int, tuple[Callable[..., Tensor], ...]] = {
    3: (functional.conv1d, grad.conv1d_input, grad.conv1d_weight),
    4: (functional.conv2d, grad.conv2d_input, grad.conv2d_weight),
    5: (functional.conv3d, grad.conv3d_input, grad.conv3d_weight),
}


def convolution_rule(
    recorder: Recorder, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor
) -> Tensor | None:
    """Layer rule of convolutions without groups."""
    if module.groups > 1 or module.padding_mode != "zeros" or input.ndim != module.weight.ndim:
        return None
    kernel, dilation = module.kernel_size, module.dilation
    if module.padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in reach)
    elif module.padding == "valid":
        padding = ((0, 0),) * len(kernel)
    else:
        padding = tuple((int(side), int(side)) for side in module.padding)
    geometry = Geometry(kernel, module.stride, dilation, padding)
    weight, bias = recorder.operand(module.weight), optional_operand(recorder, module.bias)
    return recorder.record(ConvolutionUse(weight, bias, geometry), input)

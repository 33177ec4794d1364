"""A convolution and its gradient at the input, in the way that is fast on the CPU.

Which way is taken depends on the layer and its place in the model alone, so an example's numbers
are the same in any lot, and in a cohort.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.layers.channels_last import (
    Geometry,
    channels_first,
    channels_last,
    in_order,
    is_quick,
)
from fedsim.clients.dp_sgd.per_example.layers.patches import (
    has_few_channels,
    overlap_little,
    patches_of,
    places,
)

_WIDE = 16  # output channels: narrower products are slow
_GROWTH = 4  # patches of one channel may be so many times as large as the output


def convolve(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, *, last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the convolution of x (n, channels, ...), whatever the order of x in memory.

    Args:
        x: the input.
        w: the weight.
        b: the bias.
        geometry: of the convolution.
        last: whether the output has its channels in the last place of memory, where that is quick.

    Returns:
        The output; and the patches of x, see `patches_of`, where they were copied out: gradients of
        the weight need them again.
    """
    quick = is_quick(x, geometry)
    if quick and _by_patches(w, geometry, last):
        patches = patches_of(x, w, geometry)
        size = places(x.shape[2:], w.shape[2:], geometry)
        return _products(patches, w, b, last).unflatten(2, size), patches
    if quick and last:
        return torch.convolution(channels_last(x), channels_last(w), b, *geometry), None
    return torch.convolution(channels_first(x), w, b, *geometry), None


def _products(patches: Tensor, w: Tensor, b: Tensor | None, last: bool) -> Tensor:
    """Return patches (n, places, taps) times the weight, (n, out, places)."""
    if not has_few_channels(w):
        rows = w.permute(0, 2, 3, 1).reshape(len(w), -1)
        return functional.linear(patches, rows, b).transpose(1, 2)
    rows = w.flatten(1).expand(len(patches), -1, -1)
    if last:
        taps = rows.transpose(1, 2)
        y = torch.bmm(patches, taps) if b is None else torch.baddbmm(b, patches, taps)
        return y.transpose(1, 2)
    y = torch.bmm(rows, patches.transpose(1, 2))
    return y if b is None else y.add_(b.unsqueeze(1))


def _by_patches(w: Tensor, geometry: Geometry, last: bool) -> bool:
    """Tell whether products with patches cost less than oneDNN's convolution.

    The patches come for nothing: the gradients of the weight need them anyway. On one channel
    oneDNN is slow; on many, patches are cheap where they overlap little and the input has its
    channels in the last place. Measured on x86-64 for kernels of 1 to 8 and steps of 1 and 2: a
    tenth to a third less time in all.
    """
    if len(w) < _WIDE:
        return False
    if w.shape[1] == 1:
        return w[0].numel() <= _GROWTH * len(w)
    return last and not has_few_channels(w) and overlap_little(w, geometry)


def input_gradient(x: Tensor, g: Tensor, w: Tensor, geometry: Geometry, *, last: bool) -> Tensor:
    """Return a convolution's gradient with respect to its input x, of which only the shape is read.

    Args:
        x: (n, channels, ...).
        g: gradient at the output.
        w: the weight.
        geometry: of the convolution.
        last: as for `convolve`.
    """
    if last and is_quick(g, geometry):
        g, w = channels_last(g), channels_last(w)
        x = g.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    else:  # torch goes by the order of x; memory that nobody touches costs nothing
        g, x = channels_first(g), x if x.is_contiguous() else g.new_empty(x.shape)
    backward = torch.ops.aten.convolution_backward
    return backward(g, x, w, None, *geometry, [True, False, False])[0]


def weight_gradient(x: Tensor, g: Tensor, w: Tensor, geometry: Geometry, *, last: bool) -> Tensor:
    """Return a convolution's gradient with respect to its weight.

    Args:
        x: the input (n, channels, ...).
        g: gradient at the output.
        w: the weight, of which only the shape is read.
        geometry: of the convolution.
        last: as for `convolve`.
    """
    g, x, w = (in_order(each, geometry, last=last) for each in (g, x, w))
    backward = torch.ops.aten.convolution_backward
    return backward(g, x, w, None, *geometry, [False, True, False])[1].contiguous()

"""The patches of images that a convolution's kernel sees, copied out side by side."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.layers.channels_last import (
    Geometry,
    channels_first,
    channels_last,
)

_FEW_CHANNELS = 4


def has_few_channels(w: Tensor) -> bool:
    """Tell whether patches for a weight (out, channels, ...) are copied out faster by channel."""
    return w.shape[1] <= _FEW_CHANNELS


def overlap_little(w: Tensor, geometry: Geometry) -> bool:
    """Tell whether all patches together are at most four times as large as the images."""
    (down, right), taps = geometry[0], w.shape[2:].numel()
    return taps <= 4 * down * right


def patches_of(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return the patches (n, places, taps) of images x that a weight is multiplied with.

    The taps are (channels, height, width) where channels are few, else (height, width, channels).
    """
    if has_few_channels(w):
        return patches_by_channel(x, w.shape[2:], geometry).transpose(1, 2)
    return patches_by_place(x, w.shape[2:], geometry)


def patches_by_channel(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """Return the patches (n, channels · kernel, places) of images x (n, channels, height, width).

    Quick where places that follow each other lie side by side: few channels, small steps.
    """
    (down, right), (top, left), (apart, across), *_ = geometry
    x = channels_first(x)
    x = functional.pad(x, (left, left, top, top)) if top or left else x
    size = _steps(x.shape[2:], kernel, geometry)
    example, channel, row, column = x.stride()
    patches = x.as_strided(
        (*x.shape[:2], *kernel, *size),
        (example, channel, row * apart, column * across, row * down, column * right),
    )
    return patches.reshape(x.shape[0], -1, size[0] * size[1])


def patches_by_place(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """Return the patches (n, places, kernel · channels) of images x (n, channels, height, width).

    Quick where many channels of a place lie side by side.
    """
    (down, right), (top, left), (apart, across), *_ = geometry
    x = channels_last(x).permute(0, 2, 3, 1)
    x = functional.pad(x, (0, 0, left, left, top, top)) if top or left else x
    size = _steps(x.shape[1:3], kernel, geometry)
    example, row, column, channel = x.stride()
    patches = x.as_strided(
        (x.shape[0], *size, *kernel, x.shape[3]),
        (example, row * down, column * right, row * apart, column * across, channel),
    )
    return patches.reshape(x.shape[0], size[0] * size[1], -1)


def places(image: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    """Return the height and width of a convolution's output."""
    padded = [side + 2 * more for side, more in zip(image, geometry[1], strict=True)]
    return _steps(padded, kernel, geometry)


def _steps(padded: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    strides, _, dilations, *_ = geometry
    sides = zip(padded, kernel, strides, dilations, strict=True)
    return [(side - apart * (taps - 1) - 1) // step + 1 for side, taps, step, apart in sides]

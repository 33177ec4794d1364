"""Images whose channels stand in the last place: the values of a place lie side by side.

On the CPU oneDNN and torch's pooling are faster with them, but its group norm and the sorting of
images are slow: see `image_order` for who has which.
"""

import torch
from torch import Tensor

# stride, padding, dilation, transposed, output padding, groups: as torch's operations take them.
Geometry = tuple[list[int], list[int], list[int], bool, list[int], int]


def channels_last(x: Tensor) -> Tensor:
    """Return x (n, channels, height, width) with the channels of a place side by side in memory."""
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, width * channels, channels)
    # With one channel, or images of one place, both orders are one, and torch would take the other.
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def channels_first(x: Tensor) -> Tensor:
    """Return x (n, channels, ...) with the places of a channel side by side in memory."""
    return x.contiguous().view(-1).view(x.shape)  # with one channel, likewise


def is_quick(x: Tensor, geometry: Geometry) -> bool:
    """Tell whether convolutions of such values gain from an order that is not torch's."""
    image = x.ndim == 4 and geometry[-1] == 1
    return image and x.device.type == "cpu" and x.dtype == torch.float32


def in_order(x: Tensor, geometry: Geometry, *, last: bool) -> Tensor:
    """Return x with its channels in the last place if that is wanted and quick, else in torch's."""
    return channels_last(x) if last and is_quick(x, geometry) else channels_first(x)

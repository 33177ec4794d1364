"""Images among users' arrays: one layout, (n, channels, height, width), and one range of values.

Everything follows from the type and the shape of the array, never from its values: a constant from
private examples would tell about them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.examples import DataError
from fedsim.data.settings import ImageSettings

BYTE_SCALE = 255.0
"""Largest value of an 8-bit channel, by which images of bytes are divided."""

_CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency


def as_images(array: NDArray[Any], settings: ImageSettings | None, what: str) -> NDArray[Any]:
    """Return images as (n, channels, height, width) in units of their scale; others unchanged.

    | array                               | without `data.images`                               |
    |-------------------------------------|-----------------------------------------------------|
    | uint8 of three or four dimensions   | divided by 255; a single channel gets its axis, and |
    |                                     | channels that come last come first                  |
    | other types, channels last          | refused: `data.images.channels` decides             |
    | everything else                     | unchanged                                           |

    Args:
        array: features (n, ...) of any real number type.
        settings: `data.images`; None: by these rules.
        what: name of the array, for messages.

    Raises:
        DataError: the layout is ambiguous, or the settings do not fit the array.
    """
    settings = ImageSettings() if settings is None else settings
    if settings.channels == "none" and array.ndim != 3:
        raise DataError(_misfit(array, what, "none", "(n, height, width)"))
    if settings.channels in ("first", "last") and array.ndim != 4:
        raise DataError(_misfit(array, what, settings.channels, "of four dimensions"))
    layout = settings.channels or _layout(array, what)
    if layout == "none":
        array = array[:, None]
    elif layout == "last":
        array = np.moveaxis(array, -1, 1)
    scale = settings.scale
    if scale is None and array.dtype == np.uint8 and array.ndim >= 3:
        scale = BYTE_SCALE
    if scale is None or scale == 1:
        return array
    with np.errstate(over="ignore"):  # becomes infinite, which Examples refuses
        return np.divide(array, np.float32(scale), dtype=np.float32, casting="same_kind")


def _layout(array: NDArray[Any], what: str) -> str | None:
    if array.ndim == 3 and array.dtype == np.uint8:
        return "none"
    if array.ndim != 4 or not _looks_channels_last(array.shape[1:]):
        return None
    if array.dtype == np.uint8:
        return "last"
    raise DataError(
        f"{what} has shape {array.shape}, which looks like images with channels last, and models "
        "take channels first; write data.images: {channels: last} to move them, or "
        "{channels: first} if the axes are right as they are"
    )


def _looks_channels_last(shape: tuple[int, ...]) -> bool:
    first, second, last = shape
    if first in _CHANNELS:
        return False
    return last in _CHANNELS or (first == second and last < first)


def _misfit(array: NDArray[Any], what: str, channels: str, form: str) -> str:
    return (
        f"data.images.channels: {channels} is for arrays {form}, and {what} has shape "
        f"{array.shape}; remove channels"
    )

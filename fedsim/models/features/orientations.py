"""Maps of gradient orientations: where an image has edges, and of which direction.

Gradients are central differences. The magnitude of each is divided between the two nearest of
`bins` directions. Each direction's map is summed over overlapping windows with Hann weights, as in
histograms of oriented gradients. (Dalal and Triggs, CVPR 2005; SIFT: Lowe, IJCV 2004.)
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedsim.models.features.settings import OrientationSettings

Example = NDArray[np.float64]


def orientations(
    settings: OrientationSettings, shape: tuple[int, ...]
) -> Callable[[Example], Example]:
    """Return the function from an image to its maps (channels * bins, rows, columns).

    Edge case: an image that is constant in a channel has maps of zeros there.

    Args:
        settings: number of directions; size and distance of windows in pixels; power of each
            pooled value.
        shape: shape of an image, (height, width) or (channels, height, width).
    """
    directions = np.arange(settings.bins).reshape(-1, 1, 1)
    weights = np.hanning(settings.window + 2)[1:-1]

    def transform(image: Example) -> Example:
        channels = image.reshape(-1, *shape[-2:])
        maps = np.concatenate([_maps(one, directions) for one in channels])
        return _pooled(maps, weights, settings.stride) ** settings.power

    return transform


def _maps(image: Example, directions: NDArray[np.int64]) -> Example:
    """Return the gradient magnitude (bins, height, width) of each direction."""
    rows, columns = ([0, *range(side), side - 1] for side in image.shape)
    padded = image[rows][:, columns]  # np.pad takes a third of the time of all of this
    down = (padded[2:, 1:-1] - padded[:-2, 1:-1]) / 2
    right = (padded[1:-1, 2:] - padded[1:-1, :-2]) / 2
    bins = len(directions)
    place = np.arctan2(down, right) * (bins / (2 * np.pi))  # in bins, from -bins / 2 to bins / 2
    distance = np.abs(place - directions) % bins
    share = np.maximum(0.0, 1.0 - np.minimum(distance, bins - distance))
    return share * np.hypot(down, right)


def _pooled(maps: Example, weights: Example, stride: int) -> Example:
    """Return the weighted sums of the maps over windows, every `stride` pixels."""
    window, (height, width) = len(weights), maps.shape[-2:]
    rows, columns = (1 + (side - window) // stride for side in (height, width))
    sums = np.zeros((len(maps), rows, columns))
    for y, x in np.ndindex(window, window):
        part = maps[:, y : y + stride * (rows - 1) + 1, x : x + stride * (columns - 1) + 1]
        sums += weights[y] * weights[x] * part[:, ::stride, ::stride]
    return sums

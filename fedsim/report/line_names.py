"""Names of lines beside their last points, in place of a legend."""

from collections.abc import Sequence
from typing import cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_LABEL_POINTS = 14.0  # least distance of two names


def name_lines(axes: Axes, ends: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Write the name of each line beside its last point, one above the other.

    Args:
        axes: with everything else drawn and scaled, inside `style()`.
        ends: of each line its name, its last point and its colour.
    """
    if not ends:
        return
    figure = cast(Figure, axes.figure)
    figure.draw_without_rendering()  # places are known after it
    scale = 72.0 / figure.dpi
    heights = axes.transData.transform([end for _, end, _ in ends])[:, 1] * scale
    order = sorted(range(len(ends)), key=lambda index: heights[index])
    places = _apart([float(heights[index]) for index in order])
    for index, place in zip(order, places, strict=True):
        name, end, ink = ends[index]
        axes.annotate(
            name,
            end,
            xytext=(9, place - float(heights[index])),
            textcoords="offset points",
            va="center",
            color=ink,
            annotation_clip=False,
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Return ascending places at least `_LABEL_POINTS` apart, moved as little as groups allow."""
    groups: list[tuple[float, int]] = []  # centre and number of names that stand together
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1 and _overlap(groups[-2], groups[-1]):
            (low, few), (high, more) = groups[-2:]
            groups[-2:] = [((low * few + high * more) / (few + more), few + more)]
    return [
        centre + _LABEL_POINTS * (index - (count - 1) / 2)
        for centre, count in groups
        for index in range(count)
    ]


def _overlap(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return other[0] - one[0] < _LABEL_POINTS * (one[1] + other[1]) / 2

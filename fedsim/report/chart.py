"""A figure of a report as inline SVG, in the colours and the font of the page around it.

Written by hand: importing a library for figures takes longer than a short run.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

Ink = Literal["text", "muted", "line", "accent", "bar"]  # CSS variables of the page
Point = tuple[float, float]

TEXT_PIXELS, _SMALL_PIXELS = 11.5, 11.0
_EM = 0.6  # about the width of a character in its size
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_NEARLY = 1e-4
_MARGIN = 0.05  # between the points and the ends of an axis


def width_of(texts: Iterable[str]) -> float:
    """Return about the width in pixels of the longest text."""
    return max((len(text) for text in texts), default=0) * _EM * TEXT_PIXELS


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`, `most` + 1 at most; one for nearly the same."""
    if high - low <= _NEARLY * abs(high):
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))
    step = max(1.0, math.ceil(step)) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)
    ]


def powers(low: float, high: float, factors: Sequence[float] = (1.0,)) -> list[float]:
    """Return powers of ten, times each factor, from `low` to `high`; fewer of many decades."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    stride = -(-len(exponents) // 7)
    found = [factor * 10.0**exponent for exponent in exponents[::stride] for factor in factors]
    return [value for value in found if low <= value <= high]


@dataclass(frozen=True)
class Scale:
    """Where values are, in pixels.

    Attributes:
        low: value at `start`.
        high: value at `end`.
        start: in pixels.
        end: in pixels.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def room_around(values: Sequence[float], *, logarithmic: bool = False) -> Point:
    """Return the ends of an axis with some room below and above the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if logarithmic:
        factor = (high / low) ** _MARGIN if high > low else 1.5
        return low / factor, high * factor
    room = _MARGIN * (high - low) or abs(high) * _MARGIN or _MARGIN
    return low - room, high + room


@dataclass(frozen=True)
class Tip:
    """A text to show near a point, in the coordinates of the data."""

    x: float
    y: float
    text: str


class Chart:
    """A drawing with two axes.

    Args:
        width: of the drawing, in pixels.
        height: of the drawing.
        x: horizontal scale, from left to right.
        y: vertical scale, from the bottom up, or from the top down.
    """

    def __init__(self, width: float, height: float, x: Scale, y: Scale) -> None:
        self._width, self._height, self._x, self._y = width, height, x, y
        self._left, self._right = x.start, max(x.end, width - 4)
        self._top, self._bottom = sorted((y.start, y.end))
        self._parts: list[str] = []

    def line(
        self,
        points: Iterable[Point],
        ink: Ink = "accent",
        width: float = 1.8,
        *,
        dash: str = "none",
    ) -> None:
        """Draw a line through points, with a gap at each that is not a number."""
        style = f"fill: none; stroke: var(--{ink}); stroke-width: {width}; stroke-dasharray: {dash}"
        self._add(f'<path d="{self._path(points)}" style="{style}; stroke-linejoin: round"/>')

    def area(self, points: Iterable[Point], ink: Ink = "bar", opacity: float = 1.0) -> None:
        """Fill the area that points enclose; after a gap, another one begins."""
        style = f"fill: var(--{ink}); fill-opacity: {opacity:.3g}"
        self._add(f'<path d="{self._path(points)}" style="{style}"/>')

    def dot(self, point: Point, radius: float = 2.3) -> None:
        """Draw a dot."""
        x, y = self._x(point[0]), self._y(point[1])
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill: var(--accent)"/>')

    def write(
        self,
        words: str,
        point: Point,
        offset: Point = (0.0, 0.0),
        *,
        ink: Ink = "text",
        anchor: Literal["start", "middle", "end"] = "start",
        size: float = TEXT_PIXELS,
        bold: bool = False,
    ) -> None:
        """Write words, their middle at the height of a point, moved right and down by pixels."""
        place = self._x(point[0]) + offset[0], self._y(point[1]) + offset[1]
        self._text(words, place, ink=ink, anchor=anchor, size=size, bold=bold)

    def target(self, value: float, words: str) -> None:
        """Draw a dashed line across to compare with, its words above its start."""
        y = self._y(value)
        style = "stroke: var(--muted); stroke-width: 1.1; stroke-dasharray: 4 3"
        self._add(f'<path d="M{self._left:.1f} {y:.1f}H{self._right:.1f}" style="{style}"/>')
        self._text(words, (self._left + 4, y - 8))

    def bottom_axis(self, marks: Mapping[float, str], label: str, *, turned: bool = False) -> None:
        """Draw the axis below: its marks, each with its words, and what it is."""
        y = self._bottom
        self._rule((self._left, y), (self._right, y))
        for value, words in marks.items():
            x = self._x(value)
            if turned:
                self._text(words, (x, y + 6), size=_SMALL_PIXELS, anchor="end", turned=True)
            else:
                self._rule((x, y), (x, y + 3))
                self._text(words, (x, y + 12), size=_SMALL_PIXELS, anchor="middle")
        middle = (self._left + self._right) / 2
        self._text(label, (middle, self._height - 8), anchor="middle")

    def left_axis(self, marks: Mapping[float, str], label: str = "", *, grid: bool = True) -> None:
        """Draw the axis on the left: words at each mark, rules across, and what it is."""
        for value, words in marks.items():
            y = self._y(value)
            if grid:
                self._rule((self._left, y), (self._right, y))
            self._text(words, (self._left - 5, y), size=_SMALL_PIXELS, anchor="end")
        if label:
            middle = (self._top + self._bottom) / 2
            self._text(label, (8, middle), anchor="middle", turned=len(label) > 1)

    def svg(self, label: str, tips: Sequence[Tip] = (), *, across: bool = False) -> Markup:
        """Return the drawing as an `<svg>` element.

        Args:
            label: description for screen readers.
            tips: tooltips near a point, ascending along the axis.
            across: whether each covers a row of the drawing instead of a column.
        """
        size = f"{self._width:.0f} {self._height:.0f}"
        opening = f'<svg class="plot" viewBox="0 0 {size}" role="img" aria-label="{escape(label)}">'
        strips = "".join(self._strips(tips, across))
        return Markup("\n".join([opening, *self._parts, f"<g>{strips}</g>", "</svg>"]))

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def _path(self, points: Iterable[Point]) -> str:
        steps, command = [], "M"
        for x, y in points:
            if math.isfinite(y):
                steps.append(f"{command}{self._x(x):.1f} {self._y(y):.1f}")
            command = "L" if math.isfinite(y) else "M"
        return "".join(steps)

    def _rule(self, start: Point, end: Point) -> None:
        (x, y), (to_x, to_y) = start, end
        path = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
        self._add(f'<path d="{path}" style="stroke: var(--line); stroke-width: 0.8"/>')

    def _text(
        self,
        words: str,
        place: Point,
        *,
        ink: Ink = "muted",
        anchor: str = "start",
        size: float = TEXT_PIXELS,
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        x, y = place
        style = f"font-size: {size}px; fill: var(--{ink}); text-anchor: {anchor}"
        style += "; font-weight: bold" if bold else ""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._add(
            f'<text x="{x:.1f}" y="{y:.1f}" dy="{0.35 * size:.1f}" style="{style}"{turn}>'
            f"{escape(words)}</text>"
        )

    def _strips(self, tips: Sequence[Tip], across: bool) -> Iterator[str]:
        """Yield transparent strips, each with the tooltip of the nearest point."""
        x, y = self._x, self._y
        left, right, top, bottom = self._left, self._right, self._top, self._bottom
        centres = [y(tip.y) for tip in tips] if across else [x(tip.x) for tip in tips]
        low, high = (top, bottom) if across else (left, right)
        edges = [low, *((one + other) / 2 for one, other in pairwise(centres)), high]
        for (start, end), tip in zip(pairwise(edges), tips, strict=False):
            size = max(0.0, end - start)
            box = (left, start, right - left, size) if across else (start, top, size, bottom - top)
            place = dict(zip(("x", "y", "width", "height"), box, strict=True))
            attributes = " ".join(f'{name}="{value:.1f}"' for name, value in place.items())
            yield f'<rect class="tip" {attributes}><title>{escape(tip.text)}</title></rect>'

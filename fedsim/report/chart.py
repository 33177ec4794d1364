"""Data classes that describe a chart, which `fedsim.report.drawing` draws."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Ink = str  # a CSS variable of the page: text, muted, line, accent, bar, or one of SERIES
Point = tuple[float, float]
_Item = TypeVar("_Item")

SERIES = tuple(f"series-{number}" for number in range(1, 9))  # inks told apart by colour
DASHES = ("", "9 4", "3 3")
SYMBOLS = "os^Dv<>"  # as matplotlib calls them; "_" and "|" are the caps of intervals

TEXT_PIXELS = 11.5
LINE_PIXELS = 15.0  # height of a line in headings and legends, and the least distance of two names
_EM = 0.6  # width of a character, about, as a share of its font size
_EDGE = 4.0  # pixels between the end of the rules and the edge
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_NEARLY = 1e-4
_MARGIN = 0.05  # room between the points and each end of an axis, as a share of it
_MAX_POINTS = 400  # more points than pixels would only make the file larger


def width_of(texts: Iterable[str]) -> float:
    """Return the approximate width of the longest text, in pixels."""
    return max((len(text) for text in texts), default=0) * _EM * TEXT_PIXELS


def thinned(points: Sequence[_Item]) -> Sequence[_Item]:
    """Return every k-th point, at most `_MAX_POINTS` of them, always with the last point."""
    stride = -(-len(points) // _MAX_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points


def number_text(value: float) -> str:
    """Return a number as text for a tick mark."""
    return f"{value:,.6g}".replace("e+0", "e").replace("e+", "e")


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return up to `most` + 1 round numbers from `low` to `high`; `[low]` if the two are equal."""
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
    """Return the values factor · 10^k from `low` to `high`, for whole k and each given factor.

    They are tick marks of a logarithmic axis. Over more than 7 decades, some k are left out.
    """
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    stride = -(-len(exponents) // 7)
    candidates = [factor * 10.0**exponent for exponent in exponents[::stride] for factor in factors]
    return [value for value in candidates if low <= value <= high]


def room_around(values: Sequence[float], *, logarithmic: bool = False) -> Point:
    """Return (low, high) for an axis that shows the given values with some room on both sides."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if logarithmic:
        factor = (high / low) ** _MARGIN if high > low else 1.5
        return low / factor, high * factor
    room = _MARGIN * (high - low) or abs(high) * _MARGIN or _MARGIN
    return low - room, high + room


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    low: float  # at the left or lower end; larger than `high` for an axis that falls
    high: float
    marks: Mapping[float, str]  # the text of each tick mark, by its value
    label: str = ""
    logarithmic: bool = False
    grid: bool = False  # a line crosses the chart at each mark
    upright: bool = False  # the text of tick marks below the chart is turned by 90 degrees

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 at `low` to 1 at `high`."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high != low else 0.5

    @property
    def room(self) -> float:
        """Width that the text of a vertical axis needs on the left of the chart, in pixels."""
        return (28 if self.label else 9) + width_of(self.marks.values())

    @property
    def height(self) -> float:
        """Height that the text of a horizontal axis needs below the chart, in pixels."""
        return 24 + (width_of(self.marks.values()) if self.upright else 14)


def number_axis(
    ends: Point,
    label: str = "",
    *,
    logarithmic: bool = False,
    whole: bool = False,
    percent: bool = False,
    grid: bool = False,
    most: int = 6,
) -> Axis:
    """Return an axis with up to `most` + 1 tick marks at round numbers, or at decades."""
    values = ticks(*ends, most, whole=whole)
    if logarithmic:
        few = ends[1] < 99 * ends[0]
        values = powers(*ends, (1.0, 2.0, 5.0) if few else (1.0,)) or values
    marks = {v: f"{number_text(100 * v)}%" if percent else number_text(v) for v in values}
    return Axis(*ends, marks, label, logarithmic, grid)


@dataclass(frozen=True)
class Line:
    """A line through points, with a gap wherever a coordinate is NaN.

    An infinite coordinate stands for the edge of the chart; so it does in areas, dots and notes.
    """

    points: Sequence[Point]
    ink: Ink = "accent"
    width: float = 1.8
    dash: str = ""
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Area:
    """A filled area, given by the points of its border; a NaN coordinate begins another area."""

    points: Sequence[Point]
    ink: Ink = "bar"
    opacity: float = 1.0


@dataclass(frozen=True)
class Dots:
    """A symbol of `radius` pixels at each point; `tips` are the tooltips of the points, if any."""

    points: Sequence[Point]
    ink: Ink = "accent"
    symbol: str = "o"
    radius: float = 2.3
    opacity: float = 1.0
    hollow: bool = False
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Note:
    """A text beside a point, moved right and down from the point by `offset` pixels."""

    words: str
    point: Point
    offset: Point = (0.0, 0.0)
    ink: Ink = "text"
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = TEXT_PIXELS
    bold: bool = False
    turned: bool = False


Mark = Line | Area | Dots | Note


@dataclass(frozen=True)
class Look:
    """The style of an entry in a chart's legend: colour, dashes of the line, and symbol."""

    ink: Ink
    dash: str = ""
    symbol: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure with a horizontal and a vertical axis; sizes are in pixels."""

    label: str  # for screen readers
    x: Axis  # below the chart
    y: Axis  # on the left
    marks: Sequence[Mark]  # later ones are drawn above earlier ones
    width: float = 400.0  # of the whole drawing
    height: float = 224.0  # between the ends of the vertical axis
    top: float = 8.0  # above the chart
    right: float = _EDGE  # beside the last value; grid lines cross it
    names: Sequence[tuple[str, Point, Ink]] = ()  # at the ends of lines, in their colours
    tips: Sequence[tuple[float, str]] = ()  # (value on the horizontal axis, tooltip), sorted
    across: bool = False  # tooltips are at values on the vertical axis, and shown in their rows
    heading: str = ""  # lines of text above the chart, only in a file
    legend: Mapping[str, Look] = field(default_factory=dict)  # only in a file: a page has its own

    @property
    def total_height(self) -> float:
        """Height of the whole drawing, in pixels."""
        return self.top + self.height + self.x.height

    @property
    def ends(self) -> Point:
        """Where the values and where the grid lines end, from the left in pixels."""
        aside = width_of(name for name, _, _ in self.names) + 9 if self.names else 0.0
        right = self.width - aside  # the names of lines are beside the chart
        return right - self.right, right - _EDGE


def level(value: float, ink: Ink = "muted", width: float = 1.1, tip: str = "") -> Line:
    """Return a dashed horizontal line across the chart at a value, as a mark for comparison."""
    return Line([(-math.inf, value), (math.inf, value)], ink, width, "4 3", tip=tip)


def target(value: float, words: str) -> list[Mark]:
    """Return the marks of a target: a dashed horizontal line at a value, and a text above it."""
    return [level(value), Note(words, (-math.inf, value), (4, -8), "muted")]


def interval(place: float, ends: Point, ink: Ink, *, across: bool = False) -> list[Mark]:
    """Return an error bar between two values: horizontal if `across`, else vertical."""
    points = [(end, place) if across else (place, end) for end in ends]
    return [Line(points, ink, 1.6), Dots(points, ink, "|" if across else "_", 4.0)]

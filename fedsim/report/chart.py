"""A chart as data: its axes, what is drawn on them, and its words.

A figure is a function that returns a chart; `fedsim.report.drawing` draws every chart.
"""

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
LINE_PIXELS = 15.0  # of a heading and of a legend; least distance of two names
_EM = 0.6  # about the width of a character in its size
EDGE = 4.0  # pixels right of the rules
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_NEARLY = 1e-4
_MARGIN = 0.05  # between the points and the ends of an axis
_MAX_POINTS = 400  # more points than pixels would only make the file larger


def width_of(texts: Iterable[str]) -> float:
    """Return about the width in pixels of the longest text."""
    return max((len(text) for text in texts), default=0) * _EM * TEXT_PIXELS


def shortened(text: str, most: int) -> str:
    """Return a text with at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def thinned(points: Sequence[_Item]) -> Sequence[_Item]:
    """Return at most about `_MAX_POINTS` points, evenly spread, the last one among them."""
    stride = -(-len(points) // _MAX_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points


def number_text(value: float) -> str:
    """Return a number beside an axis."""
    return f"{value:,.6g}".replace("e+0", "e").replace("e+", "e")


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


def room_around(values: Sequence[float], *, logarithmic: bool = False) -> Point:
    """Return the ends of an axis with some room below and above the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if logarithmic:
        factor = (high / low) ** _MARGIN if high > low else 1.5
        return low / factor, high * factor
    room = _MARGIN * (high - low) or abs(high) * _MARGIN or _MARGIN
    return low - room, high + room


@dataclass(frozen=True)
class Axis:
    """What one direction of a chart shows.

    Attributes:
        low: value at the left or below; larger than `high` where values fall.
        high: value at the right or above.
        marks: values with words, and the words.
        label: what it is.
        logarithmic: whether equal distances are equal ratios.
        grid: whether a rule crosses the chart at each mark.
        upright: whether the words of marks below the chart are turned.
    """

    low: float
    high: float
    marks: Mapping[float, str]
    label: str = ""
    logarithmic: bool = False
    grid: bool = False
    upright: bool = False

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high != low else 0.5

    @property
    def room(self) -> float:
        """Pixels for its words on the left of a chart."""
        return (28 if self.label else 9) + width_of(self.marks.values())

    @property
    def height(self) -> float:
        """Pixels for its words below a chart."""
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
    """Return an axis with marks at round numbers.

    Args:
        ends: its values at both ends, ascending.
        label: what it is.
        logarithmic: whether equal distances are equal ratios.
        whole: whether only whole numbers are marked.
        percent: whether they are written in percent.
        grid: whether a rule crosses the chart at each mark.
        most: marks, less one; of a logarithmic axis its decades decide.
    """
    found = ticks(*ends, most, whole=whole)
    if logarithmic:
        few = ends[1] < 99 * ends[0]
        found = powers(*ends, (1.0, 2.0, 5.0) if few else (1.0,)) or found
    marks = {v: f"{number_text(100 * v)}%" if percent else number_text(v) for v in found}
    return Axis(*ends, marks, label, logarithmic, grid)


@dataclass(frozen=True)
class Line:
    """A line through points, with a gap at each that is not a number.

    An infinite coordinate is the edge of the chart, here and in all that is drawn.
    """

    points: Sequence[Point]
    ink: Ink = "accent"
    width: float = 1.8
    dash: str = ""
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Area:
    """The area that points enclose; after a gap, another one begins."""

    points: Sequence[Point]
    ink: Ink = "bar"
    opacity: float = 1.0


@dataclass(frozen=True)
class Dots:
    """A symbol at each point, `radius` pixels in size, with a tooltip each if there are any."""

    points: Sequence[Point]
    ink: Ink = "accent"
    symbol: str = "o"
    radius: float = 2.3
    opacity: float = 1.0
    hollow: bool = False
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Note:
    """Words, their middle at the height of a point, moved right and down by pixels."""

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
class Tip:
    """A text to show near a point, in the coordinates of the data."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Look:
    """How a legend shows what has a name."""

    ink: Ink
    dash: str = ""
    symbol: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure with two axes.

    Attributes:
        label: its description for screen readers.
        x: the axis below.
        y: the axis on the left.
        marks: what is drawn, each above the ones before it.
        width: of the whole drawing, in pixels.
        height: between the axes, in pixels.
        top: pixels above.
        right: pixels right of the last value, over which rules go on.
        names: of lines, each with the last point and the ink of its line.
        tips: tooltips near a point, ascending along the axis.
        across: whether each tooltip covers a row of the drawing instead of a column.
        heading: lines above the chart, in a file.
        legend: what is drawn, in a file; a page says it elsewhere.
    """

    label: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    width: float = 400.0
    height: float = 224.0
    top: float = 8.0
    right: float = EDGE
    names: Sequence[tuple[str, Point, Ink]] = ()
    tips: Sequence[Tip] = ()
    across: bool = False
    heading: str = ""
    legend: Mapping[str, Look] = field(default_factory=dict)

    @property
    def total_height(self) -> float:
        """Of the whole drawing, in pixels."""
        return self.top + self.height + self.x.height

    @property
    def aside(self) -> float:
        """Pixels right of the rules, for names."""
        return width_of(name for name, _, _ in self.names) + 9 if self.names else 0.0


def level(value: float, ink: Ink = "muted", width: float = 1.1, tip: str = "") -> Line:
    """Return a dashed line across the chart, to compare with."""
    return Line([(-math.inf, value), (math.inf, value)], ink, width, "4 3", tip=tip)


def target(value: float, words: str) -> list[Mark]:
    """Return a dashed line across, its words above its start."""
    return [level(value), Note(words, (-math.inf, value), (4, -8), "muted")]


def interval(place: float, ends: Point, ink: Ink, *, across: bool = False) -> list[Mark]:
    """Return a line between two ends at a place, with caps; a horizontal one if `across`."""
    points = [(end, place) if across else (place, end) for end in ends]
    return [Line(points, ink, 1.6), Dots(points, ink, "|" if across else "_", 4.0)]

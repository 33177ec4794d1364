"""A figure of a comparison, a chart and its numbers as a table; the look of variants, and axes."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.comparison.results import Results
from fedsim.comparison.statistics import Estimate
from fedsim.core.formatting import epsilon_text
from fedsim.core.metrics import metric_entry
from fedsim.core.text_formats import csv_text
from fedsim.report.chart import (
    DASHES,
    SERIES,
    SYMBOLS,
    Axis,
    Chart,
    Ink,
    Point,
    number_axis,
    room_around,
)

_LEAST_APART = 0.12  # of the axis, between two marks at ε


@dataclass(frozen=True)
class Look:
    """Colour, dashes and symbol of a variant in all figures; its number from 1 on in the page."""

    ink: Ink
    dash: str
    symbol: str
    number: int


@dataclass(frozen=True)
class Picture:
    """A figure of a comparison.

    Attributes:
        name: its name in the page and of its files, such as `rounds`.
        caption: the line above it.
        chart: the drawing; its heading is what every reader of the file must know.
        columns: names of the columns of its CSV.
        rows: the numbers that are drawn; None is an empty cell.
    """

    name: str
    caption: str
    chart: Chart
    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    def to_csv(self) -> str:
        """Return the numbers as CSV."""
        return csv_text(self.columns, self.rows)


def looks_of(results: Results) -> dict[str, Look]:
    """Return a colour for each variant; beyond eight they differ in their dashes too."""
    count = len(SERIES)
    return {
        variant.name: Look(
            ink=SERIES[index % count],
            dash=DASHES[index // count % len(DASHES)],
            symbol=SYMBOLS[(index + index // count) % len(SYMBOLS)],
            number=index + 1,
        )
        for index, variant in enumerate(results.variants)
    }


def figure_name(results: Results, name: str) -> str:
    """Return a name that is unique among the figures of both units of a comparison.

    Args:
        results: the variants of one unit.
        name: the figure.
    """
    return f"{name}-{results.groups[0].unit}" if results.has_sibling else name


def clipped(metric: str, value: float) -> float:
    """Return the nearest value that a metric can have."""
    least, most = metric_entry(metric).bounds
    return min(max(value, least), most)


def ends_of(metric: str, estimate: Estimate) -> Point | None:
    """Return the ends of an interval, clipped to what the metric can be; None without one."""
    if estimate.low is None or estimate.high is None:
        return None
    return clipped(metric, estimate.low), clipped(metric, estimate.high)


def metric_axis(metric: str, values: Sequence[float], label: str, *, most: int = 6) -> Axis:
    """Return the axis of a metric, which does not go beyond the metric's bounds.

    Args:
        metric: the metric on it.
        values: all that is drawn.
        label: what it is.
        most: marks, less one.
    """
    low, high = room_around(values)
    margin = 0.02 * (high - low)  # a line on the bound stays whole
    ends = max(low, clipped(metric, low) - margin), min(high, clipped(metric, high) + margin)
    percent = metric_entry(metric).in_percent
    return number_axis(ends, label, percent=percent, grid=True, most=most)


def epsilon_axis(epsilons: Sequence[float], label: str, beyond: float | None = None) -> Axis:
    """Return a logarithmic axis with few marks, at values of ε or at round numbers.

    Args:
        epsilons: the values of ε on it.
        label: what it is.
        beyond: the place of clients without privacy; None: there are none.
    """
    ends = min(epsilons) / 1.35, 1.6 * max([*epsilons, beyond or 0.0])
    axis = number_axis(ends, label, logarithmic=True)
    marks = {value: text for value, text in axis.marks.items() if value <= 1.3 * max(epsilons)}
    known = sorted({float(epsilon_text(epsilon)) for epsilon in epsilons})
    if len(known) <= 6:
        marks, last = {}, 0.0
        for epsilon in known:
            if not marks or axis.share(epsilon) - axis.share(last) > _LEAST_APART:
                marks[epsilon], last = f"{epsilon:g}", epsilon
    if beyond is not None:
        marks[beyond] = "no privacy"
    return Axis(*ends, marks, label, logarithmic=True)

"""The figures of a comparison: each is a chart with its numbers as a table.

Here is what they share: the look of variants, axes, and estimates with intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsim.comparison.results import Results, VariantResult
from fedsim.core.formatting import epsilon_text
from fedsim.core.metrics import metric_entry
from fedsim.core.text_formats import csv_text
from fedsim.report.chart import (
    DASHES,
    SERIES,
    SYMBOLS,
    Axis,
    Chart,
    Dots,
    Look,
    Mark,
    Point,
    interval,
    number_axis,
    room_around,
)

ESTIMATE = ("n", "mean", "low", "high")  # columns
_LEAST_APART = 0.1  # of the axis, between two marks at ε


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
    count, kinds, symbols = len(SERIES), len(DASHES), len(SYMBOLS)
    return {
        variant.name: Look(
            ink=SERIES[index % count],
            dash=DASHES[index // count % kinds],
            symbol=SYMBOLS[(index + index // count) % symbols],
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


def ends_of(metric: str, variant: VariantResult) -> Point | None:
    """Return the ends of an interval, clipped to what the metric can be; None without one."""
    estimate, (least, most) = variant.metrics[metric], metric_entry(metric).bounds
    if estimate.low is None or estimate.high is None:
        return None
    return max(estimate.low, least), min(estimate.high, most)


def values_of(metric: str, variants: Sequence[VariantResult]) -> list[float]:
    """Return the means of variants and the ends of their intervals."""
    means = [one.metrics[metric].mean for one in variants]
    return means + [end for one in variants for end in ends_of(metric, one) or ()]


def numbers_of(metric: str, variant: VariantResult) -> tuple[float | None, ...]:
    """Return the columns `ESTIMATE` of a variant."""
    own = variant.metrics[metric]
    return own.n, own.mean, own.low, own.high


def estimate(variant: VariantResult, metric: str, place: float, look: Look, tip: str) -> list[Mark]:
    """Return the mean of a variant's metric as a dot, with its interval.

    Args:
        variant: the variant.
        metric: its metric.
        place: of the dot on the axis below.
        look: of the dot.
        tip: its tooltip.
    """
    ends = ends_of(metric, variant)
    marks = [] if ends is None else interval(place, ends, look.ink)
    point = (place, variant.metrics[metric].mean)
    return [*marks, Dots([point], look.ink, look.symbol, 3.0, tips=[tip])]


def metric_axis(metric: str, values: Sequence[float], label: str, *, most: int = 6) -> Axis:
    """Return the axis of a metric, which does not go beyond the metric's bounds.

    Args:
        metric: the metric on it.
        values: all that is drawn.
        label: what it is.
        most: marks, less one.
    """
    (low, high), entry = room_around(values), metric_entry(metric)
    margin = 0.02 * (high - low)  # a line on the bound stays whole
    ends = max(low, entry.bounds[0] - margin), min(high, entry.bounds[1] + margin)
    return number_axis(ends, label, percent=entry.in_percent, grid=True, most=most)


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
        marks = {}
        for epsilon in known:
            if all(axis.share(epsilon) - axis.share(other) > _LEAST_APART for other in marks):
                marks[epsilon] = f"{epsilon:g}"
    if beyond is not None:
        marks[beyond] = "no privacy"
    return replace(axis, marks=marks)

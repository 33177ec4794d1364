"""Figures of a comparison, each a chart with its numbers as a table.

This module has what all figures share: the variants' colours, the axes, and means with intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsim.comparison.results import Results, VariantResult
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
    """A figure of a comparison: a chart, and the numbers that it shows as the rows of a CSV.

    If the chart shows private data, its heading warns the reader.
    """

    name: str
    caption: str
    chart: Chart
    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    def to_csv(self) -> str:
        """Return the drawn numbers as CSV."""
        return csv_text(self.columns, self.rows)


def capital(text: str) -> str:
    """Return a text with a capital first letter; ε stays small, as its capital looks like E."""
    return text if text.startswith("ε") else text[0].upper() + text[1:]


def looks_of(results: Results) -> dict[str, Look]:
    """Return the colour, line style and symbol of each variant, by its name.

    From the ninth variant on, the colours repeat with another line style.
    """
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
    """Return a figure's name that is unique among the figures of both privacy units."""
    return name if results.unit is None else f"{name}-{results.unit}"


def ends_of(metric: str, estimate: Estimate) -> Point | None:
    """Return the interval of a mean metric, clipped to its range; None for a single seed."""
    least, most = metric_entry(metric).bounds
    if estimate.low is None or estimate.high is None:
        return None
    return max(estimate.low, least), min(estimate.high, most)


def values_of(metric: str, estimates: Sequence[Estimate]) -> list[float]:
    """Return means of a metric, then both ends of their intervals."""
    ends = [end for estimate in estimates for end in ends_of(metric, estimate) or ()]
    return [estimate.mean for estimate in estimates] + ends


def numbers_of(estimate: Estimate) -> list[float | None]:
    """Return the values of the columns `ESTIMATE`; low and high are the ends of the interval."""
    return [getattr(estimate, name) for name in ESTIMATE]


def estimate(variant: VariantResult, metric: str, place: float, look: Look, tip: str) -> list[Mark]:
    """Return the chart marks of a variant's mean metric: a dot for the mean, and its interval."""
    mean = variant.metrics[metric]
    ends = ends_of(metric, mean)
    marks = [] if ends is None else interval(place, ends, look.ink)
    return [*marks, Dots([(place, mean.mean)], look.ink, look.symbol, 3.0, tips=[tip])]


def metric_axis(metric: str, values: Sequence[float], label: str, *, most: int = 6) -> Axis:
    """Return the axis for a metric's values, limited to its range, with at most `most` steps."""
    (low, high), entry = room_around(values), metric_entry(metric)
    margin = 0.02 * (high - low)  # a line on the bound stays whole
    ends = max(low, entry.bounds[0] - margin), min(high, entry.bounds[1] + margin)
    return number_axis(ends, label, percent=entry.in_percent, grid=True, most=most)


def epsilon_axis(epsilons: Sequence[float], label: str, beyond: float | None = None) -> Axis:
    """Return a logarithmic axis for ε with few tick marks, at values of ε or at round numbers.

    Clients without privacy are drawn at `beyond`; None if there are none.
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

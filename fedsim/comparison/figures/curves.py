"""The compared metric over the rounds, over the spent ε, and against the ε of each variant.

Curves have a band over the seeds, points an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.special import stdtrit

from fedsim.comparison.figures.picture import (
    WIDE_INCHES,
    Picture,
    Series,
    Tips,
    epsilon_axis,
    figure_name,
    metric_axis,
    series_of,
    thin,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE, Estimate
from fedsim.comparison.text import interval_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.core.metrics import metric_entry
from fedsim.report.svg import Ink

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Curve:
    """Means over the seeds, with the ends of their intervals; float64 (points,) each.

    Attributes:
        variant: name of the variant.
        n: number of seeds.
        x: rounds, or mean ε after each round.
        mean: mean of the metric.
        low: lower end of the interval, clipped to the metric's bounds; the mean for one seed.
        high: upper end, likewise.
    """

    variant: str
    n: int
    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def over_rounds(results: Results) -> Picture | None:
    """Return the mean metric over the rounds for each variant; None where nothing is finite."""
    curves = [_curve(one, results.metric, None) for one in results.variants]
    return _picture(results, "rounds", "round", curves)


def over_epsilon(results: Results) -> Picture | None:
    """Return the mean metric over the ε spent so far; None where no variant spends a finite ε."""
    curves = [
        _curve(one, results.metric, _table(one, "epsilon_max"))
        for one in results.variants
        if one.is_private and one.epsilon is not None
    ]
    return _picture(results, "over-epsilon", "largest ε of any client so far", curves)


def _picture(results: Results, name: str, x_label: str, found: Sequence[_Curve]) -> Picture | None:
    metric, series = results.metric, series_of(results)
    curves = [curve for curve in found if len(curve.x)]
    if not curves:
        return None
    has_band = any(curve.n > 1 for curve in curves)

    def paint(axes: Axes, tips: Tips) -> None:
        for curve in curves:
            one, keep = series[curve.variant], thin(len(curve.x))
            if curve.n > 1:
                band = curve.low[keep], curve.high[keep]
                axes.fill_between(curve.x[keep], *band, color=one.colour, alpha=0.14, lw=0)
        for curve in curves:
            one, keep = series[curve.variant], thin(len(curve.x))
            gid = tips.add(
                f"{curve.variant}: {metric_text(metric, float(curve.mean[-1]))} at the end"
            )
            marker = "o" if len(curve.x) == 1 else None
            axes.plot(
                curve.x[keep],
                curve.mean[keep],
                color=one.colour,
                ls=one.dashes,
                marker=marker,
                gid=gid,
            )
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=x_label == "round"))
        axes.set_xlabel(x_label)
        axes.set_ylabel(metric_words(metric))
        metric_axis(axes, metric)

    ends = "; ".join(f"{curve.variant} ends at {_end(curve, metric)}" for curve in curves)
    band = f", {CONFIDENCE:.0%} bands over seeds" if has_band else ""
    places = () if x_label == "round" else ("epsilon",)
    what = "over the rounds" if x_label == "round" else "against the spent ε"
    return Picture(
        name=figure_name(results, name),
        caption=f"{metric_words(metric).capitalize()} {what}{band}",
        label=f"{metric_words(metric)} against {x_label}, means over the seeds: {ends}",
        inches=WIDE_INCHES,
        columns=("variant", "round", *places, "n", "mean", "low", "high"),
        rows=[row for curve in curves for row in _rows(curve, with_x=x_label != "round")],
        paint=paint,
        series={one.variant: replace(series[one.variant], marker="") for one in curves},
    )


def _end(curve: _Curve, metric: str) -> str:
    return metric_text(metric, float(curve.mean[-1]))


def _curve(variant: VariantResult, metric: str, x: Floats | None) -> _Curve:
    """Return the curve of the rounds that every finished seed has.

    Args:
        variant: the variant.
        metric: a key of `rounds.jsonl`.
        x: place of each round in each run, float64 (runs, rounds); None: the round.
    """
    table = _table(variant, metric)
    length = table.shape[1] if x is None else min(table.shape[1], x.shape[1])
    table, n = table[:, :length], table.shape[0]
    mean = table.mean(axis=0) if n else np.zeros(0)
    half = np.zeros(length)
    if n > 1:
        quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
        half = quantile * table.std(axis=0, ddof=1) / np.sqrt(n)
    least, most = metric_entry(metric).bounds
    places = np.arange(1.0, length + 1) if x is None else x[:, :length].mean(axis=0)
    low, high = np.clip(mean - half, least, most), np.clip(mean + half, least, most)
    return _Curve(variant.name, n, places, mean, low, high)


def _rows(curve: _Curve, *, with_x: bool) -> list[tuple[object, ...]]:
    """Return a row for each round; a single seed has no interval."""
    rows: list[tuple[object, ...]] = []
    for index in range(len(curve.x)):
        place = (float(curve.x[index]),) if with_x else ()
        single = curve.n < 2
        ends = (None, None) if single else (float(curve.low[index]), float(curve.high[index]))
        rows.append((curve.variant, index + 1, *place, curve.n, float(curve.mean[index]), *ends))
    return rows


def _table(variant: VariantResult, name: str) -> Floats:
    """Return a row for each finished run, a column for each round that all of them have."""
    rows = [[row.get(name) for row in run.rounds] for run in variant.finished_runs]
    length = min((len(row) for row in rows), default=0)
    table = np.array([row[:length] for row in rows], dtype=float).reshape(len(rows), length)
    finite = np.isfinite(table).all(axis=0) if rows else np.ones(0, dtype=bool)
    return table[:, : length if finite.all() else int(np.argmin(finite))]


_SAME_EPSILON = 1.06  # of two points whose ε differ by less, one is moved aside by as much


def tradeoff(results: Results) -> Picture | None:
    """Return the metric against ε with intervals, and a line for each variant without privacy.

    None where no variant has a finite ε.
    """
    metric, series = results.metric, series_of(results)
    shown = [one for one in results.variants if metric in one.metrics]
    private = [(one.epsilon, one) for one in shown if one.epsilon]
    if not private:
        return None

    def paint(axes: Axes, tips: Tips) -> None:
        for variant in shown:
            if not variant.is_private:
                _draw_level(axes, variant, metric, series[variant.name], tips)
        for place, variant in _apart(private):
            _draw_point(axes, place, variant, metric, series[variant.name], tips)
        epsilon_axis(axes, [epsilon for epsilon, _ in private])
        metric_axis(axes, metric)
        axes.set_ylabel(metric_words(metric))

    words = (
        f"{variant.name} {interval_text(metric, variant.metrics[metric])} at "
        + (
            f"ε = {epsilon_text(variant.epsilon)} ({variant.observer})"
            if variant.is_private
            else "no privacy"
        )
        for variant in shown
    )
    rows = []
    for variant in shown:
        one = variant.metrics[metric]
        rows.append((variant.name, variant.epsilon, one.n, one.mean, one.low, one.high))
    return Picture(
        name=figure_name(results, "tradeoff"),
        caption=f"{metric_words(metric).capitalize()} against ε, with 95 % intervals",
        label=f"{metric_words(metric)} against ε with 95 % intervals: {'; '.join(words)}",
        inches=WIDE_INCHES,
        columns=("variant", "epsilon", "n", "mean", "low", "high"),
        rows=rows,
        paint=paint,
        series={one.name: series[one.name] for one in shown},
    )


def _apart(
    points: Sequence[tuple[float, VariantResult]],
) -> list[tuple[float, VariantResult]]:
    """Return the points with a place on the axis each: equal ε stand side by side."""
    placed: list[tuple[float, VariantResult]] = []
    for epsilon, variant in sorted(points, key=lambda point: point[0]):
        last = placed[-1][0] * _SAME_EPSILON if placed else 0.0
        placed.append((max(epsilon, last), variant))
    return placed


def _draw_level(
    axes: Axes, variant: VariantResult, metric: str, series: Series, tips: Tips
) -> None:
    """Draw a variant without privacy: it has no place on the ε axis, so it is a line."""
    estimate = variant.metrics[metric]
    ends = _clipped(estimate, metric)
    if ends is not None:
        axes.axhspan(*ends, color=series.colour, alpha=0.13, lw=0)
    gid = tips.add(f"{variant.name}: {interval_text(metric, estimate)}, no privacy")
    axes.axhline(estimate.mean, color=series.colour, lw=1.8, ls=(0, (5, 3)), gid=gid)
    axes.annotate(
        metric_text(metric, estimate.mean),
        (1, estimate.mean),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=Ink.TEXT,
    )


def _draw_point(
    axes: Axes, place: float, variant: VariantResult, metric: str, series: Series, tips: Tips
) -> None:
    estimate = variant.metrics[metric]
    ends = _clipped(estimate, metric)
    if ends is not None:
        axes.plot([place] * 2, ends, color=series.colour, lw=1.8)
        for end in ends:
            axes.plot(place, end, marker="_", ms=9, color=series.colour)
    tip = (
        f"{variant.name}: {interval_text(metric, estimate)} at ε ≤ {epsilon_text(variant.epsilon)}"
    )
    tip += "" if variant.observer in (None, "server") else f" against {variant.observer}"
    axes.plot(
        place, estimate.mean, marker=series.marker, ms=7, color=series.colour, gid=tips.add(tip)
    )


def _clipped(estimate: Estimate, metric: str) -> tuple[float, float] | None:
    """Return the ends of an interval, clipped to what the metric can be; None without one."""
    if estimate.low is None or estimate.high is None:
        return None
    least, most = metric_entry(metric).bounds
    return max(estimate.low, least), min(estimate.high, most)

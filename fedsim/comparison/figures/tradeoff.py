"""The compared metric against ε, a point with its interval for each variant."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from fedsim.comparison.figures.axes import epsilon_axis, metric_axis, metric_bounds
from fedsim.comparison.figures.picture import (
    WIDE_INCHES,
    Picture,
    Series,
    Tips,
    figure_name,
    series_of,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import Estimate
from fedsim.comparison.text import interval_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.report.svg import Ink

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
    least, most = metric_bounds(metric)
    return max(estimate.low, least), min(estimate.high, most)

"""The figures of a comparison. Imports matplotlib, so import it when drawing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import interval_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.report.svg import Ink, inline_svg, style

_WIDE_INCHES = (400 / 72, 270 / 72)  # little more than a phone: text must stay legible there
_CURVE_INCHES = (330 / 72, 245 / 72)
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MARKERS = "os^Dv<>P"
_MAX_TIPS = 600  # single points with a text of their own
_MAX_CLIENT_POINTS = 4000
_MAX_CURVE_POINTS = 300


@dataclass(frozen=True)
class Series:
    """Colour, dashes and marker of a variant in all figures."""

    colour: str
    dashes: object
    marker: str
    number: int


@dataclass
class _Tips:
    """The tooltips of a figure, by the gid of their artist."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> str:
        """Add a tooltip and return the gid for its artist."""
        gid = f"tip-{len(self.texts) + 1}"
        self.texts[gid] = text
        return gid


def series_of(results: Results) -> dict[str, Series]:
    """Return a colour for each variant; beyond eight they differ in their dashes too."""
    colours = Ink.SERIES
    return {
        variant.name: Series(
            colour=colours[index % len(colours)],
            dashes=_DASHES[index // len(colours) % len(_DASHES)],
            marker=_MARKERS[index % len(_MARKERS)],
            number=index % len(colours) + 1,
        )
        for index, variant in enumerate(results.variants)
    }


def draw_tradeoff(results: Results) -> Markup | None:
    """Return the metric against ε with intervals, and a line for each variant without privacy.

    None where no variant has a finite ε.
    """
    metric, series, tips = results.metric, series_of(results), _Tips()
    private = [
        (variant.epsilon, variant)
        for variant in results.variants
        if variant.epsilon and metric in variant.metrics
    ]
    if not private:
        return None
    with style():
        figure, axes = _new(_WIDE_INCHES)
        for variant in results.variants:
            if not variant.is_private and metric in variant.metrics:
                _draw_level(axes, variant, metric, series[variant.name], tips)
        for epsilon, variant in private:
            _draw_point(axes, epsilon, variant, metric, series[variant.name], tips)
        _epsilon_axis(axes, [epsilon for epsilon, _ in private])
        _metric_axis(axes, metric)
        axes.set_ylabel(metric_words(metric))
        words = (
            f"{variant.name} {interval_text(metric, variant.metrics[metric])} at "
            + (
                f"ε = {epsilon_text(variant.epsilon)} ({variant.observer})"
                if variant.is_private
                else "no privacy"
            )
            for variant in results.variants
            if metric in variant.metrics
        )
        label = f"{metric_words(metric)} against ε with 95 % intervals: {'; '.join(words)}"
        return inline_svg(
            figure, name=_figure_name(results, "tradeoff"), label=label, tips=tips.texts
        )


def draw_rounds(results: Results) -> Markup | None:
    """Return the mean metric over the rounds for each variant; None where nothing is finite."""
    return _draw_curves(results, "rounds", "round", _by_round)


def draw_over_epsilon(results: Results) -> Markup | None:
    """Return the mean metric over the ε spent so far; None where no variant spends a finite ε."""
    return _draw_curves(results, "over-epsilon", "largest ε of any client so far", _by_epsilon)


def draw_fairness(results: Results, metric: str) -> Markup | None:
    """Return each client's own metric against its own ε; None without client metrics.

    Args:
        results: the results of the comparison.
        metric: a metric of `client_metrics.json`, such as `client_accuracy`.
    """
    series, tips = series_of(results), _Tips()
    points = {variant.name: _client_points(variant, metric) for variant in results.variants}
    total = sum(len(found) for found in points.values())
    if not total:
        return None
    epsilons = [e for found in points.values() for e, _, _ in found if e is not None]
    with style():
        figure, axes = _new(_WIDE_INCHES)
        beyond = 1.9 * max(epsilons, default=1.0)  # where clients without privacy stand
        for name, found in points.items():
            shown = found[:: max(1, -(-total // _MAX_CLIENT_POINTS))]
            _draw_clients(axes, shown, beyond, series[name], tips, single=total <= _MAX_TIPS)
        _epsilon_axis(axes, epsilons or [1.0], beyond if _any_without(points) else None)
        axes.set_xlabel("ε of the client")
        _metric_axis(axes, metric)
        axes.set_ylabel(f"{_client_words(metric)} on its own data")
        label = f"{_client_words(metric)} of every client on its own data against its ε"
        return inline_svg(
            figure, name=_figure_name(results, "fairness"), label=label, tips=tips.texts
        )


def draw_spend_distribution(results: Results) -> Markup | None:
    """Return, for each private variant, the share of clients that spent at most ε."""
    series = series_of(results)
    spends = {
        variant.name: np.sort(
            [epsilon for run in variant.finished_runs for epsilon in _epsilons(run)]
        )
        for variant in results.variants
        if variant.is_private
    }
    spends = {name: found for name, found in spends.items() if len(found)}
    if not spends:
        return None
    with style():
        figure, axes = _new(_CURVE_INCHES)
        largest = max(float(found[-1]) for found in spends.values())
        for name, found in spends.items():
            shares = np.arange(1, len(found) + 1) / len(found)
            x, y = np.r_[0.0, found, 1.08 * largest], np.r_[0.0, shares, 1.0]
            keep = _thin(len(x))
            one = series[name]
            axes.plot(x[keep], y[keep], color=one.colour, ls=one.dashes, drawstyle="steps-post")
        axes.set_xlim(0, 1.08 * largest)
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("ε")
        axes.set_ylabel("clients with at most this ε")
        words = (
            f"{name} from {epsilon_text(float(found[0]))} to {epsilon_text(float(found[-1]))}"
            for name, found in spends.items()
        )
        label = f"Distribution of ε over the clients of all runs: {'; '.join(words)}"
        return inline_svg(figure, name=_figure_name(results, "spend"), label=label)


def _draw_level(
    axes: Axes, variant: VariantResult, metric: str, series: Series, tips: _Tips
) -> None:
    """Draw a variant without privacy: it has no place on the ε axis, so it is a line."""
    estimate = variant.metrics[metric]
    if estimate.low is not None and estimate.high is not None:
        axes.axhspan(estimate.low, estimate.high, color=series.colour, alpha=0.13, lw=0)
    gid = tips.add(f"{variant.name}: {interval_text(metric, estimate)}, no privacy")
    axes.axhline(estimate.mean, color=series.colour, lw=1.8, ls=(0, (5, 3)), gid=gid)
    axes.annotate(
        f"{variant.name} {metric_text(metric, estimate.mean)}",
        (0, estimate.mean),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, 3),
        textcoords="offset points",
        color=Ink.TEXT,
    )


def _draw_point(
    axes: Axes, epsilon: float, variant: VariantResult, metric: str, series: Series, tips: _Tips
) -> None:
    estimate = variant.metrics[metric]
    if estimate.low is not None and estimate.high is not None:
        axes.plot([epsilon] * 2, [estimate.low, estimate.high], color=series.colour, lw=1.8)
        for end in (estimate.low, estimate.high):
            axes.plot(epsilon, end, marker="_", ms=9, color=series.colour)
    tip = f"{variant.name}: {interval_text(metric, estimate)} at ε ≤ {epsilon_text(epsilon)}"
    tip += "" if variant.observer in (None, "server") else f" against {variant.observer}"
    gid = tips.add(tip)
    axes.plot(epsilon, estimate.mean, marker=series.marker, ms=7, color=series.colour, gid=gid)
    axes.annotate(
        metric_text(metric, estimate.mean),
        (epsilon, estimate.mean),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=Ink.TEXT,
    )


_Points = tuple[Sequence[float], Sequence[float]]


def _draw_curves(
    results: Results, name: str, x_label: str, points: Callable[[VariantResult, str], _Points]
) -> Markup | None:
    series, tips = series_of(results), _Tips()
    curves = [(one, *points(one, results.metric)) for one in results.variants]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return None
    with style():
        figure, axes = _new(_CURVE_INCHES)
        for variant, x, y in curves:
            one, keep = series[variant.name], _thin(len(x))
            gid = tips.add(f"{variant.name}: {metric_text(results.metric, y[-1])} at the end")
            marker = "o" if len(x) == 1 else None
            x_kept, y_kept = np.asarray(x)[keep], np.asarray(y)[keep]
            axes.plot(x_kept, y_kept, color=one.colour, ls=one.dashes, marker=marker, gid=gid)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=x_label == "round"))
        axes.set_xlabel(x_label)
        _metric_axis(axes, results.metric)
        ends = "; ".join(
            f"{variant.name} ends at {metric_text(results.metric, y[-1])}"
            for variant, _, y in curves
        )
        label = f"{metric_words(results.metric)} against {x_label}, means over the seeds: {ends}"
        return inline_svg(figure, name=_figure_name(results, name), label=label, tips=tips.texts)


def _by_round(variant: VariantResult, metric: str) -> _Points:
    """Return the rounds that every finished seed has, and the mean metric after each."""
    table = _table(variant, metric)
    return (range(1, table.shape[1] + 1), table.mean(axis=0).tolist())


def _by_epsilon(variant: VariantResult, metric: str) -> _Points:
    """Return mean ε and mean metric after each round; nothing for a variant without finite ε."""
    if not variant.is_private or variant.epsilon is None:
        return ((), ())
    spent = _table(variant, "epsilon_max")
    rounds = min(spent.shape[1], _table(variant, metric).shape[1])
    return (
        spent[:, :rounds].mean(axis=0).tolist(),
        _table(variant, metric)[:, :rounds].mean(axis=0).tolist(),
    )


def _table(variant: VariantResult, name: str) -> np.ndarray:
    """Return a row for each finished run, a column for each round that all of them have."""
    rows = [[row.get(name) for row in run.rounds] for run in variant.finished_runs]
    length = min((len(row) for row in rows), default=0)
    table = np.array([row[:length] for row in rows], dtype=float).reshape(len(rows), length)
    finite = np.isfinite(table).all(axis=0) if rows else np.ones(0, dtype=bool)
    return table[:, : length if finite.all() else int(np.argmin(finite))]


def _client_points(variant: VariantResult, metric: str) -> list[tuple[float | None, float, str]]:
    """Return (ε or None without privacy, metric, text) of every client of every finished run."""
    found = []
    for run in variant.finished_runs:
        spends = {row["client"]: row["epsilon"] for row in run.clients}
        for row in run.client_metrics:
            if row.get(metric) is None:
                continue
            epsilon = spends.get(row["client"])
            bound = f"ε ≤ {epsilon_text(epsilon)}" if run.is_private else "no privacy"
            text = (
                f"{variant.name}, seed {run.seed}, client {row['client']} ({row['examples']} "
                f"examples): {metric_text(metric, row[metric])}, {bound}"
            )
            found.append((epsilon, row[metric], text))
    return found


def _draw_clients(
    axes: Axes,
    points: Sequence[tuple[float | None, float, str]],
    beyond: float,
    series: Series,
    tips: _Tips,
    *,
    single: bool,
) -> None:
    look = {"marker": series.marker, "ms": 5, "color": series.colour, "alpha": 0.5, "mew": 0}
    places = [(beyond if e is None else e, value, text) for e, value, text in points]
    if single:
        for x, y, text in places:
            axes.plot(x, y, ls="none", gid=tips.add(text), **look)
    elif places:
        x, y, _ = zip(*places, strict=True)
        axes.plot(x, y, ls="none", rasterized=False, **look)


def _any_without(points: dict[str, list[tuple[float | None, float, str]]]) -> bool:
    return any(epsilon is None for found in points.values() for epsilon, _, _ in found)


def _epsilons(run: RunOutcome) -> list[float]:
    return [row["epsilon"] for row in run.clients if row["epsilon"] is not None]


def _figure_name(results: Results, name: str) -> str:
    """Return a name that is unique in a page with figures of two units."""
    return f"{name}-{results.groups[0].unit or 'none'}"


def _new(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def _epsilon_axis(axes: Axes, epsilons: Sequence[float], beyond: float | None = None) -> None:
    """Make a logarithmic axis with readable numbers; `beyond` is the place of no privacy."""
    low, high = min(epsilons), max([*epsilons, beyond or 0.0])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.35, high * 1.6)
    ticks = sorted({float(epsilon_text(e)) for e in epsilons if e > 0})
    if len(ticks) > 6:
        ticks = [
            step * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in (1, 2, 5)
            if low / 1.3 <= step * 10.0**power <= max(epsilons) * 1.3
        ]
    names = {tick: f"{tick:g}" for tick in ticks}
    if beyond is not None:
        names[beyond] = "no privacy"
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: names.get(tick, "")))
    axes.set_xlabel("ε of a run (its largest of any client)")


def _metric_axis(axes: Axes, metric: str) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(6))
    if metric.endswith("accuracy"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=_decimals(axes)))


def _decimals(axes: Axes) -> int:
    low, high = axes.get_ylim()
    return 1 if high - low < 0.04 else 0


def _client_words(metric: str) -> str:
    return metric.removeprefix("client_").replace("r2", "R²").replace("mse", "squared error")


def _thin(length: int) -> np.ndarray:
    """Return at most about `_MAX_CURVE_POINTS` indices, evenly spread, both ends among them."""
    count = min(length, _MAX_CURVE_POINTS)
    return np.unique(np.linspace(0, length - 1, count).round().astype(int))

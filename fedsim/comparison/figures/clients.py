"""Figures client by client: metrics on their own data, and what they spent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from fedsim.comparison.figures.picture import (
    WIDE_INCHES,
    Picture,
    Series,
    Tips,
    epsilon_axis,
    figure_name,
    metric_axis,
    series_of,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import common_words
from fedsim.core.formatting import epsilon_text, metric_text, percent_text
from fedsim.core.metrics import metric_name

_MAX_TIPS = 600  # single points with a text of their own
_MAX_CLIENT_POINTS = 4000
_MAX_NAME_CHARACTERS = 22
_ROW_INCHES = 0.36
_PRIVATE = "Private figures: no ε covers them. Do not publish."
_LEAST_SPREAD = 0.05  # below it, boxes would only show a scale
_QUARTILES = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class _ClientPoint:
    """A client of one run: its ε (None without privacy), its metric, and both in words."""

    seed: int
    client: int
    epsilon: float | None
    value: float
    text: str


def fairness(results: Results, metric: str) -> Picture | None:
    """Return each client's own metric against its own ε; None without client metrics.

    Args:
        results: the results of the comparison.
        metric: a metric of `client_metrics.json`, such as `client_accuracy`.
    """
    series = series_of(results)
    points = {variant.name: _client_points(variant, metric) for variant in results.variants}
    total = sum(len(found) for found in points.values())
    if not total:
        return None
    every = [point for found in points.values() for point in found]
    epsilons = [point.epsilon for point in every if point.epsilon is not None]
    beyond = 1.9 * max(epsilons, default=1.0)  # where clients without privacy stand

    def paint(axes: Axes, tips: Tips) -> None:
        for name, found in points.items():
            shown = found[:: max(1, -(-total // _MAX_CLIENT_POINTS))]
            _draw_clients(axes, shown, beyond, series[name], tips, single=total <= _MAX_TIPS)
        without = any(point.epsilon is None for point in every)
        epsilon_axis(axes, epsilons or [1.0], beyond if without else None)
        axes.set_xlabel("ε of the client")
        metric_axis(axes, metric)
        axes.set_ylabel(f"{metric_name(metric)} on its own data")

    what = f"{metric_name(metric)} of every client against its ε"
    return Picture(
        name=figure_name(results, "private-clients"),
        warning=_PRIVATE,
        caption=what.capitalize(),
        label=what,
        inches=WIDE_INCHES,
        columns=("variant", "seed", "client", "epsilon", metric),
        rows=[
            (name, one.seed, one.client, one.epsilon, one.value)
            for name, found in points.items()
            for one in found
        ],
        paint=paint,
        series=series,
    )


def metric_boxes(results: Results, metric: str) -> Picture | None:
    """Return a box of the clients' own metric for each variant; None without client metrics.

    Args:
        results: the results of the comparison.
        metric: as `fairness`.
    """
    values = {
        variant.name: [point.value for point in _client_points(variant, metric)]
        for variant in results.variants
    }
    what = f"{metric_name(metric)} of clients on their own data"
    return _boxes(results, "private-client-boxes", what, values, metric)


def spend_boxes(results: Results) -> Picture | None:
    """Return a box of the clients' ε for each variant; None where they hardly differ."""
    values = _spends(results)
    if _spread(values) < _LEAST_SPREAD:
        return None
    return _boxes(results, "spend", "ε of the clients", values, None)


def spend_sentence(results: Results) -> str | None:
    """Return how little the clients' ε differ, in place of boxes; None without finite ε."""
    values = _spends(results)
    if not values:
        return None
    spread = _spread(values)
    if all(epsilon_text(max(own)) == epsilon_text(min(own)) for own in values.values()):
        return "In each variant all clients have the same ε."
    return f"In each variant the ε of the clients differ by at most {percent_text(spread)}."


def _spends(results: Results) -> dict[str, list[float]]:
    """Return every client's finite ε, by variant."""
    found = {
        variant.name: [
            row["epsilon"]
            for run in variant.finished_runs
            for row in run.clients
            if row["epsilon"] is not None
        ]
        for variant in results.variants
        if variant.is_private
    }
    return {name: own for name, own in found.items() if own}


def _spread(values: Mapping[str, Sequence[float]]) -> float:
    """Return the largest share by which the ε of a variant's clients differ."""
    return max((1 - min(own) / max(own) for own in values.values() if max(own) > 0), default=0.0)


def _boxes(
    results: Results,
    name: str,
    what: str,
    values: Mapping[str, Sequence[float]],
    metric: str | None,
) -> Picture | None:
    """Return boxes from quartile to quartile, with whiskers to the extreme clients."""
    series = series_of(results)
    rows = {
        one: (len(own), *(float(q) for q in np.percentile(own, _QUARTILES)))
        for one, own in values.items()
        if own
    }
    if not rows:
        return None
    prefix = common_words(list(rows))

    def paint(axes: Axes, tips: Tips) -> None:
        for place, (one, (n, *quartiles)) in enumerate(rows.items()):
            _draw_box(axes, place, one, n, quartiles, series[one], tips, metric)
        axes.set_yticks(range(len(rows)), [_short(one.removeprefix(prefix)) for one in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(what)
        axes.set_ylabel(prefix.removesuffix("="))
        if metric is None:
            axes.set_xlim(left=0)
        else:
            metric_axis(axes, metric, horizontal=True)

    words = "; ".join(
        f"{one} from {_text(metric, low)} to {_text(metric, high)}, median {_text(metric, middle)}"
        for one, (_, low, _, middle, _, high) in rows.items()
    )
    return Picture(
        name=figure_name(results, name),
        warning=_PRIVATE if metric else "",
        caption=f"{_capital(what)}: quartiles and extremes",
        label=f"{what} of all runs: {words}",
        inches=(WIDE_INCHES[0], _ROW_INCHES * len(rows) + 0.75),
        columns=("variant", "clients", "minimum", "quartile_1", "median", "quartile_3", "maximum"),
        rows=[(one, *numbers) for one, numbers in rows.items()],
        paint=paint,
        series={},  # the axis names the variants
    )


def _draw_box(
    axes: Axes,
    place: int,
    name: str,
    n: int,
    quartiles: Sequence[float],
    series: Series,
    tips: Tips,
    metric: str | None,
) -> None:
    low, first, middle, third, high = quartiles
    axes.plot([low, high], [place] * 2, color=series.colour, lw=1.4)
    for end in (low, high):
        axes.plot(end, place, marker="|", ms=8, color=series.colour)
    axes.barh(place, third - first, left=first, height=0.56, color=series.colour, alpha=0.35)
    middle_text, low_text, high_text = (_text(metric, value) for value in (middle, low, high))
    gid = tips.add(f"{name}: median {middle_text}, {low_text} to {high_text}, {n:,} clients")
    axes.plot([middle] * 2, [place - 0.28, place + 0.28], color=series.colour, lw=2.4, gid=gid)


def _text(metric: str | None, value: float) -> str:
    return epsilon_text(value) if metric is None else metric_text(metric, value)


def _capital(text: str) -> str:
    """Return a text with a capital; ε stays small: its capital looks like an E."""
    return text if text.startswith("ε") else text[0].upper() + text[1:]


def _short(name: str) -> str:
    limit = _MAX_NAME_CHARACTERS
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _client_points(variant: VariantResult, metric: str) -> list[_ClientPoint]:
    """Return every client of every finished run that has the metric."""
    found = []
    for run in variant.finished_runs:
        spends = {row["client"]: row for row in run.clients}
        for row in run.client_metrics:
            if row.get(metric) is None:
                continue
            spend = spends.get(row["client"], {})
            epsilon, name = spend.get("epsilon"), spend.get("name")
            who = f"client {row['client']}" + (f", {name}" if name else "")
            bound = f"ε ≤ {epsilon_text(epsilon)}" if run.is_private else "no privacy"
            text = (
                f"{variant.name}, seed {run.seed}, {who} ({row['examples']} examples): "
                f"{metric_text(metric, row[metric])}, {bound}"
            )
            found.append(_ClientPoint(run.seed, row["client"], epsilon, row[metric], text))
    return found


def _draw_clients(
    axes: Axes,
    points: Sequence[_ClientPoint],
    beyond: float,
    series: Series,
    tips: Tips,
    *,
    single: bool,
) -> None:
    look = {"marker": series.marker, "ms": 5, "color": series.colour, "alpha": 0.5, "mew": 0}
    x = [beyond if point.epsilon is None else point.epsilon for point in points]
    if single:
        for place, point in zip(x, points, strict=True):
            axes.plot(place, point.value, ls="none", gid=tips.add(point.text), **look)
    elif points:
        axes.plot(x, [point.value for point in points], ls="none", rasterized=False, **look)

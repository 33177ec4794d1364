"""Figures of the variants: the metric over the rounds and against ε; clients one by one.

Curves have a band over the seeds, points an interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fedsim.comparison.figures.picture import (
    Look,
    Picture,
    ends_of,
    epsilon_axis,
    figure_name,
    looks_of,
    metric_axis,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE
from fedsim.comparison.text import common_words, interval_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text, percent_text
from fedsim.core.metrics import metric_entry, metric_name
from fedsim.report.chart import (
    Area,
    Axis,
    Chart,
    Dots,
    Entry,
    Line,
    Mark,
    interval,
    level,
    names,
    number_axis,
    shortened,
    thinned,
    width_of,
)

Floats = NDArray[np.float64]

_SAME_EPSILON = 1.06  # of two points whose ε differ by less, one is moved aside by as much
_MAX_TIPS = 600  # clients with a text of their own
_MAX_CLIENTS = 4000
_MAX_NAME_CHARACTERS = 22
_ROW_PIXELS = 26
_PRIVATE = "Private figures: no ε covers them. Do not publish."
_LEAST_SPREAD = 0.05  # below it, boxes would only show a scale
_INTERVAL = ("n", "mean", "low", "high")  # columns
_QUARTILES = (0, 25, 50, 75, 100)


def pictures_of(results: Results) -> dict[str, Picture | None]:
    """Return the figures of the variants of one unit, by what they are; None: nothing to draw."""
    metric = _client_metric(results)
    return {
        "tradeoff": tradeoff(results),
        "rounds": over_rounds(results),
        "over_epsilon": over_epsilon(results),
        "fairness": None if metric is None else fairness(results, metric),
        "boxes": None if metric is None else metric_boxes(results, metric),
        "spend": spend_boxes(results),
    }


def _client_metric(results: Results) -> str | None:
    """Return the per-client metric that corresponds to the compared metric."""
    for run in results.outcomes:
        for row in run.client_metrics:
            wanted = "client_" + results.metric.removeprefix("test_")
            return wanted if wanted in row else "client_loss"
    return None


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

    def path(self, values: Floats) -> list[tuple[float, float]]:
        """Return points to draw."""
        return list(thinned(list(zip(self.x.tolist(), values.tolist(), strict=True))))


def over_rounds(results: Results) -> Picture | None:
    """Return the mean metric over the rounds for each variant; None where nothing is finite."""
    curves = [_curve(one, results.metric, None) for one in results.variants]
    return _curves(results, "rounds", "round", curves)


def over_epsilon(results: Results) -> Picture | None:
    """Return the mean metric over the ε spent so far; None where no variant spends a finite ε."""
    curves = [
        _curve(one, results.metric, _table(one, "epsilon_max"))
        for one in results.variants
        if one.is_private and one.epsilon is not None
    ]
    return _curves(results, "over-epsilon", "largest ε of any client so far", curves)


def _curves(results: Results, name: str, x_label: str, found: Sequence[_Curve]) -> Picture | None:
    metric, looks, is_rounds = results.metric, looks_of(results), x_label == "round"
    curves = [curve for curve in found if len(curve.x)]
    if not curves:
        return None
    marks: list[Mark] = [
        Area([*one.path(one.low), *one.path(one.high)[::-1]], looks[one.variant].ink, 0.14)
        for one in curves
        if one.n > 1
    ]
    words = {one.variant: metric_text(metric, float(one.mean[-1])) for one in curves}
    for one in curves:
        look, tip = looks[one.variant], f"{one.variant}: {words[one.variant]} at the end"
        points = one.path(one.mean)
        marks.append(
            Line(points, look.ink, dash=look.dash, tip=tip)
            if len(points) > 1
            else Dots(points, look.ink, radius=3.0, tips=[tip])
        )
    every = [value for one in curves for value in (*one.low.tolist(), *one.high.tolist())]
    xs = [place for one in curves for place in (float(one.x[0]), float(one.x[-1]))]
    band = f", {CONFIDENCE:.0%} bands over seeds" if any(one.n > 1 for one in curves) else ""
    what = "over the rounds" if is_rounds else "against the spent ε"
    ends = "; ".join(f"{one} ends at {text}" for one, text in words.items())
    return Picture(
        name=figure_name(results, name),
        caption=f"{metric_words(metric).capitalize()} {what}{band}",
        chart=Chart(
            label=f"{metric_words(metric)} against {x_label}, means over the seeds: {ends}",
            x=number_axis((min(xs), max(xs)), x_label, whole=is_rounds, most=5),
            y=metric_axis(metric, every, metric_words(metric)),
            marks=marks,
            right=14,
            legend=[Entry(one, looks[one].ink, looks[one].dash) for one in words],
        ),
        columns=("variant", "round", *(() if is_rounds else ("epsilon",)), *_INTERVAL),
        rows=[row for curve in curves for row in _rows(curve, with_x=not is_rounds)],
    )


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
    bounds = metric_entry(metric).bounds
    places = np.arange(1.0, length + 1) if x is None else x[:, :length].mean(axis=0)
    low, high = np.clip(mean - half, *bounds), np.clip(mean + half, *bounds)
    return _Curve(variant.name, n, places, mean, low, high)


def _rows(curve: _Curve, *, with_x: bool) -> list[tuple[object, ...]]:
    """Return a row for each round; a single seed has no interval."""
    rows: list[tuple[object, ...]] = []
    for index in range(len(curve.x)):
        place = (float(curve.x[index]),) if with_x else ()
        ends = (float(curve.low[index]), float(curve.high[index]))
        mean = float(curve.mean[index])
        shown = ends if curve.n > 1 else (None, None)
        rows.append((curve.variant, index + 1, *place, curve.n, mean, *shown))
    return rows


def _table(variant: VariantResult, name: str) -> Floats:
    """Return a row for each finished run, a column for each round that all of them have."""
    rows = [[row.get(name) for row in run.rounds] for run in variant.finished_runs]
    length = min((len(row) for row in rows), default=0)
    table = np.array([row[:length] for row in rows], dtype=float).reshape(len(rows), length)
    finite = np.isfinite(table).all(axis=0) if rows else np.ones(0, dtype=bool)
    return table[:, : length if finite.all() else int(np.argmin(finite))]


def tradeoff(results: Results) -> Picture | None:
    """Return the metric against ε with intervals, and a line for each variant without privacy.

    None where no variant has a finite ε.
    """
    metric, looks = results.metric, looks_of(results)
    shown = [one for one in results.variants if metric in one.metrics]
    private = [(one.epsilon, one) for one in shown if one.epsilon]
    if not private:
        return None
    estimates = {one.name: one.metrics[metric] for one in shown}
    ends = {name: ends_of(metric, one) for name, one in estimates.items()}
    y = metric_axis(
        metric,
        [
            *(one.mean for one in estimates.values()),
            *(end for own in ends.values() for end in own or ()),
        ],
        metric_words(metric),
    )
    marks, levels = list[Mark](), list[tuple[str, tuple[float, float], str]]()
    for one in shown:
        ink, mean, own = looks[one.name].ink, estimates[one.name].mean, ends[one.name]
        if one.is_private:
            continue
        if own is not None:
            marks.append(_band(own, ink))
        tip = f"{one.name}: {interval_text(metric, estimates[one.name])}, no privacy"
        marks.append(level(mean, ink, 1.8, tip))
        levels.append((metric_text(metric, mean), (math.inf, mean), ink))
    for place, one in _apart(private):
        look, mean, own = looks[one.name], estimates[one.name].mean, ends[one.name]
        if own is not None:
            marks += interval(place, own, look.ink)
        marks.append(Dots([(place, mean)], look.ink, look.symbol, 3.5, tips=[_tip(one, metric)]))
    return Picture(
        name=figure_name(results, "tradeoff"),
        caption=f"{metric_words(metric).capitalize()} against ε, with 95 % intervals",
        chart=Chart(
            label=f"{metric_words(metric)} against ε with 95 % intervals: "
            + "; ".join(_words(one, metric) for one in shown),
            x=epsilon_axis([one for one, _ in private], "ε of a run (its largest of any client)"),
            y=y,
            marks=[*marks, *names(levels, y, Chart.height)],
            aside=width_of(text for text, _, _ in levels),
            legend=_legend({one.name: looks[one.name] for one in shown}),
        ),
        columns=("variant", "epsilon", *_INTERVAL),
        rows=[
            (one.name, one.epsilon, own.n, own.mean, own.low, own.high)
            for one, own in zip(shown, estimates.values(), strict=True)
        ],
    )


def _band(ends: tuple[float, float], ink: str) -> Area:
    (low, high), edge = ends, math.inf
    return Area([(-edge, low), (edge, low), (edge, high), (-edge, high)], ink, 0.13)


def _legend(looks: Mapping[str, Look]) -> list[Entry]:
    return [Entry(name, one.ink, one.dash, one.symbol) for name, one in looks.items()]


def _words(variant: VariantResult, metric: str) -> str:
    bound = f"ε = {epsilon_text(variant.epsilon)} ({variant.observer})"
    where = bound if variant.is_private else "no privacy"
    return f"{variant.name} {interval_text(metric, variant.metrics[metric])} at {where}"


def _tip(variant: VariantResult, metric: str) -> str:
    against = "" if variant.observer in (None, "server") else f" against {variant.observer}"
    bound = f"ε ≤ {epsilon_text(variant.epsilon)}{against}"
    return f"{variant.name}: {interval_text(metric, variant.metrics[metric])} at {bound}"


def _apart(
    points: Sequence[tuple[float, VariantResult]],
) -> list[tuple[float, VariantResult]]:
    """Return the points with a place on the axis each: equal ε stand side by side."""
    placed: list[tuple[float, VariantResult]] = []
    for epsilon, variant in sorted(points, key=lambda point: point[0]):
        last = placed[-1][0] * _SAME_EPSILON if placed else 0.0
        placed.append((max(epsilon, last), variant))
    return placed


@dataclass(frozen=True)
class _Client:
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
    looks = looks_of(results)
    clients = {variant.name: _clients(variant, metric) for variant in results.variants}
    every = [one for found in clients.values() for one in found]
    if not every:
        return None
    epsilons = [one.epsilon for one in every if one.epsilon is not None]
    beyond = 1.9 * max(epsilons, default=1.0)  # where clients without privacy stand
    marks = list[Mark]()
    for name, found in clients.items():
        shown = found[:: max(1, -(-len(every) // _MAX_CLIENTS))]
        points = [(beyond if one.epsilon is None else one.epsilon, one.value) for one in shown]
        tips = [one.text for one in shown] if len(every) <= _MAX_TIPS else ()
        marks.append(Dots(points, looks[name].ink, looks[name].symbol, 2.5, 0.5, tips=tips))
    has_plain = len(epsilons) < len(every)
    what = f"{metric_name(metric)} of every client against its ε"
    return Picture(
        name=figure_name(results, "private-clients"),
        caption=what.capitalize(),
        chart=Chart(
            label=what,
            x=epsilon_axis(epsilons or [1.0], "ε of the client", beyond if has_plain else None),
            y=metric_axis(
                metric, [one.value for one in every], f"{metric_name(metric)} on its own data"
            ),
            marks=marks,
            heading=_PRIVATE,
            legend=_legend(looks),
        ),
        columns=("variant", "seed", "client", "epsilon", metric),
        rows=[
            (name, one.seed, one.client, one.epsilon, one.value)
            for name, found in clients.items()
            for one in found
        ],
    )


def _clients(variant: VariantResult, metric: str) -> list[_Client]:
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
            found.append(_Client(run.seed, row["client"], epsilon, row[metric], text))
    return found


def metric_boxes(results: Results, metric: str) -> Picture | None:
    """Return a box of the clients' own metric for each variant; None without client metrics.

    Args:
        results: the results of the comparison.
        metric: as `fairness`.
    """
    values = {
        variant.name: [one.value for one in _clients(variant, metric)]
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
    looks = looks_of(results)
    rows = {
        one: (len(own), *(float(q) for q in np.percentile(own, _QUARTILES)))
        for one, own in values.items()
        if own
    }
    if not rows:
        return None
    marks, words = list[Mark](), list[str]()
    for row, (one, (n, *quartiles)) in enumerate(rows.items()):
        low, _, middle, _, high = (
            epsilon_text(one) if metric is None else metric_text(metric, one) for one in quartiles
        )
        tip = f"{one}: median {middle}, {low} to {high}, {n:,} clients"
        marks += _box(row, quartiles, looks[one].ink, tip)
        words.append(f"{one} from {low} to {high}, median {middle}")
    every, prefix = [end for _, *ends in rows.values() for end in ends], common_words(list(rows))
    own = [shortened(one.removeprefix(prefix), _MAX_NAME_CHARACTERS) for one in rows]
    return Picture(
        name=figure_name(results, name),
        caption=f"{_capital(what)}: quartiles and extremes",
        chart=Chart(
            label=f"{what} of all runs: {'; '.join(words)}",
            x=number_axis((0.0, 1.05 * max(every)), what, grid=True)
            if metric is None
            else metric_axis(metric, every, what, most=5),
            y=Axis(len(rows) - 0.5, -0.5, dict(enumerate(own)), prefix.removesuffix("=")),
            marks=marks,
            height=_ROW_PIXELS * len(rows),
            right=18,
            heading=_PRIVATE if metric else "",
        ),
        columns=("variant", "clients", "minimum", "quartile_1", "median", "quartile_3", "maximum"),
        rows=[(one, *numbers) for one, numbers in rows.items()],
    )


def _box(row: int, quartiles: Sequence[float], ink: str, tip: str) -> list[Mark]:
    low, first, middle, third, high = quartiles
    corners = [(first, row - 0.28), (third, row - 0.28), (third, row + 0.28), (first, row + 0.28)]
    median = Line([(middle, row - 0.28), (middle, row + 0.28)], ink, 2.4, tip=tip)
    return [*interval(row, (low, high), ink, across=True), Area(corners, ink, 0.35), median]


def _capital(text: str) -> str:
    """Return a text with a capital; ε stays small: its capital looks like an E."""
    return text if text.startswith("ε") else text[0].upper() + text[1:]

"""Figures of variants: the metric over rounds and against ε, and the values of single clients.

Curves have a confidence band over seeds, and points have an interval.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from fedsim.comparison.figures import (
    ESTIMATE,
    Picture,
    capital,
    ends_of,
    epsilon_axis,
    estimate,
    figure_name,
    looks_of,
    metric_axis,
    numbers_of,
    values_of,
)
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.statistics import CONFIDENCE, Estimate, t_interval
from fedsim.comparison.text import common_words, mean_text, metric_words
from fedsim.core.formatting import epsilon_text, metric_text, percent_text, shortened
from fedsim.core.metrics import metric_name
from fedsim.report.chart import (
    Area,
    Axis,
    Chart,
    Dots,
    Ink,
    Line,
    Look,
    Mark,
    Point,
    interval,
    level,
    number_axis,
    thinned,
)

_SAME_EPSILON = 1.06  # of two points whose ε differ by less, one is moved aside by as much
_MAX_TIPS = 600  # clients with a text of their own
_MAX_CLIENTS = 4000
_MAX_NAME_CHARACTERS = 22
_ROW_PIXELS = 26
_PRIVATE = "Private figures: no ε covers them. Do not publish."
_LEAST_SPREAD = 0.05  # below it, boxes would only show a scale
_QUARTILES = (0, 25, 50, 75, 100)


def pictures_of(results: Results) -> dict[str, Picture | None]:
    """Return all figures of the results, by name; a figure that has no data to show is None."""
    rows = (row for run in results.outcomes for row in run.client_metrics)
    metric = "client_" + results.metric.removeprefix("test_")
    metric = metric if metric in next(rows, ()) else "client_loss"
    against, spent = "against the spent ε", "largest ε of any client so far"
    return {
        "tradeoff": tradeoff(results),
        "rounds": _curves(results, "rounds", "over the rounds", "round", "round"),
        "over_epsilon": _curves(results, "over-epsilon", against, spent, "epsilon_max"),
        "fairness": fairness(results, metric),
        "boxes": metric_boxes(results, metric),
        "spend": spend_boxes(results),
    }


# The mean of a metric over the seeds at a place on the horizontal axis.
_CurvePoint = tuple[float, Estimate]


def _curves(results: Results, name: str, against: str, x_label: str, x: str) -> Picture | None:
    """Return the figure of each variant's mean metric against `x`, a key of `rounds.jsonl`."""
    metric, words, is_rounds = results.metric, metric_words(results.metric), x == "round"
    shown = [v for v in results.variants if is_rounds or v.epsilon is not None]
    curves = {v.name: points for v in shown if (points := _curve(v, metric, x))}
    if not curves:
        return None
    looks = {variant: replace(looks_of(results)[variant], symbol="") for variant in curves}
    last = {variant: metric_text(metric, points[-1][1].mean) for variant, points in curves.items()}
    banded = {variant: points for variant, points in curves.items() if points[0][1].n > 1}
    marks: list[Mark] = [_band(metric, points, looks[name]) for name, points in banded.items()]
    for variant, points in curves.items():
        marks.append(_path(points, looks[variant], f"{variant}: {last[variant]} at the end"))
    every = [point for points in curves.values() for point in points]
    places = [place for place, _ in every]
    x_axis = number_axis((min(places), max(places)), x_label, whole=is_rounds, most=5)
    values = values_of(metric, [mean for _, mean in every])
    ends = "; ".join(f"{variant} ends at {text}" for variant, text in last.items())
    label = f"{words} against {x_label}, means over the seeds: {ends}"
    band = f", {CONFIDENCE:.0%} bands over seeds" if banded else ""
    return Picture(
        figure_name(results, name),
        f"{capital(words)} {against}{band}",
        Chart(label, x_axis, metric_axis(metric, values, words), marks, right=14, legend=looks),
        ("variant", "round", *(() if is_rounds else ("epsilon",)), *ESTIMATE),
        [
            (variant, number, *(() if is_rounds else (place,)), *numbers_of(mean))
            for variant, points in curves.items()
            for number, (place, mean) in enumerate(points, start=1)
        ],
    )


def _band(metric: str, points: Sequence[_CurvePoint], look: Look) -> Area:
    shown = thinned([(x, *ends) for x, mean in points if (ends := ends_of(metric, mean))])
    border = [(x, low) for x, low, _ in shown] + [(x, high) for x, _, high in reversed(shown)]
    return Area(border, look.ink, 0.14)


def _path(points: Sequence[_CurvePoint], look: Look, tip: str) -> Line | Dots:
    shown = [(x, mean.mean) for x, mean in thinned(points)]
    if len(shown) == 1:
        return Dots(shown, look.ink, radius=3.0, tips=[tip])
    return Line(shown, look.ink, dash=look.dash, tip=tip)


def _curve(variant: VariantResult, metric: str, x: str) -> list[_CurvePoint]:
    """Return the means over the rounds that all finished seeds have, up to one not finite.

    Intervals are clipped to the metric's range; `x` and `metric` are keys of `rounds.jsonl`.
    """
    points = list[_CurvePoint]()
    for rows in zip(*(run.rounds for run in variant.finished_runs), strict=False):
        values = np.array([[row.get(key) for row in rows] for key in (x, metric)], dtype=float)
        if not np.isfinite(values).all():
            break
        mean = t_interval(values[1].tolist())
        low, high = ends_of(metric, mean) or (None, None)
        points.append((float(values[0].mean()), replace(mean, low=low, high=high)))
    return points


def tradeoff(results: Results) -> Picture | None:
    """Return the figure of the final metric against ε, with a point for each variant.

    Variants without privacy are horizontal lines. The result is None if no variant has a finite ε.
    """
    metric, words, looks = results.metric, metric_words(results.metric), looks_of(results)
    shown = [variant for variant in results.variants if metric in variant.metrics]
    private = [(variant.epsilon, variant) for variant in shown if variant.epsilon]
    if not private:
        return None
    texts = {v.name: f"{v.name}: {mean_text(results, v)}" for v in shown}
    marks, names = list[Mark](), list[tuple[str, Point, Ink]]()
    for variant in shown:
        if not variant.is_private:
            ink, mean = looks[variant.name].ink, variant.metrics[metric].mean
            (low, high), edge = ends_of(metric, variant.metrics[metric]) or (mean, mean), math.inf
            marks.append(Area([(-edge, low), (edge, low), (edge, high), (-edge, high)], ink, 0.13))
            marks.append(level(mean, ink, 1.8, f"{texts[variant.name]}, no privacy"))
            names.append((metric_text(metric, mean), (edge, mean), ink))
    for place, variant in _apart(private):
        against = "" if variant.observer in (None, "server") else f" against {variant.observer}"
        tip = f"{texts[variant.name]} at ε ≤ {epsilon_text(variant.epsilon)}{against}"
        marks += estimate(variant, metric, place, looks[variant.name], tip)
    x = epsilon_axis([epsilon for epsilon, _ in private], "ε of a run (its largest of any client)")
    y = metric_axis(metric, values_of(metric, [v.metrics[metric] for v in shown]), words)
    said = "; ".join(f"{v.name} {mean_text(results, v)} at {_bound(v)}" for v in shown)
    label = f"{words} against ε with 95 % intervals: {said}"
    return Picture(
        figure_name(results, "tradeoff"),
        f"{capital(words)} against ε, with 95 % intervals",
        Chart(label, x, y, marks, names=names, legend={name: looks[name] for name in texts}),
        ("variant", "epsilon", *ESTIMATE),
        [(v.name, v.epsilon, *numbers_of(v.metrics[metric])) for v in shown],
    )


def _bound(variant: VariantResult) -> str:
    if not variant.is_private:
        return "no privacy"
    return f"ε = {epsilon_text(variant.epsilon)} ({variant.observer})"


def _apart(points: Sequence[tuple[float, VariantResult]]) -> list[tuple[float, VariantResult]]:
    """Return the points with positions on the ε axis; points with equal ε stand side by side."""
    placed: list[tuple[float, VariantResult]] = []
    for epsilon, variant in sorted(points, key=lambda point: point[0]):
        last = placed[-1][0] * _SAME_EPSILON if placed else 0.0
        placed.append((max(epsilon, last), variant))
    return placed


class _Client(NamedTuple):
    """A client of one run: its ε (None without privacy), its metric, and a tooltip text."""

    seed: int
    client: int
    epsilon: float | None
    value: float
    text: str


def fairness(results: Results, metric: str) -> Picture | None:
    """Return the figure of each client's metric against its ε; None without client metrics."""
    looks = looks_of(results)
    clients = {variant.name: list(_clients(variant, metric)) for variant in results.variants}
    every = [client for members in clients.values() for client in members]
    if not every:
        return None
    epsilons = [client.epsilon for client in every if client.epsilon] or [1.0]
    beyond = 1.9 * max(epsilons)  # where clients without privacy stand
    marks = list[Mark]()
    for name, members in clients.items():
        shown = members[:: -(-len(every) // _MAX_CLIENTS)]
        # An ε of 0 has no place on a logarithmic axis: it stands at the edge.
        points = [
            (beyond if client.epsilon is None else client.epsilon or -math.inf, client.value)
            for client in shown
        ]
        tips = [client.text for client in shown] if len(every) <= _MAX_TIPS else ()
        marks.append(Dots(points, looks[name].ink, looks[name].symbol, 2.5, 0.5, tips=tips))
    plain = beyond if any(client.epsilon is None for client in every) else None
    x = epsilon_axis(epsilons, "ε of the client", plain)
    words = metric_name(metric)
    y = metric_axis(metric, [client.value for client in every], f"{words} on its own data")
    title = f"{words} of every client against its ε"
    return Picture(
        figure_name(results, "private-clients"),
        capital(title),
        Chart(title, x, y, marks, heading=_PRIVATE, legend=looks),
        ("variant", "seed", "client", "epsilon", metric),
        [(name, *client[:-1]) for name, members in clients.items() for client in members],
    )


def _clients(variant: VariantResult, metric: str) -> Iterator[_Client]:
    """Yield every client with the metric, over all finished runs."""
    for run in variant.finished_runs:
        spends = {row["client"]: row for row in run.clients}
        for row in (row for row in run.client_metrics if row.get(metric) is not None):
            spend = spends.get(row["client"], {})
            epsilon, name = spend.get("epsilon"), spend.get("name")
            who = f"client {row['client']}" + (f", {name}" if name else "")
            bound = f"ε ≤ {epsilon_text(epsilon)}" if run.is_private else "no privacy"
            text = (
                f"{variant.name}, seed {run.seed}, {who} ({row['examples']} examples): "
                f"{metric_text(metric, row[metric])}, {bound}"
            )
            yield _Client(run.seed, row["client"], epsilon, row[metric], text)


def metric_boxes(results: Results, metric: str) -> Picture | None:
    """Return box plots of a metric of the clients for each variant; None without client metrics."""
    values = {v.name: [client.value for client in _clients(v, metric)] for v in results.variants}
    title = f"{metric_name(metric)} of clients on their own data"
    return _boxes(results, "private-client-boxes", title, values, metric)


def spend_boxes(results: Results) -> Picture | None:
    """Return box plots of the clients' ε for each variant; None if these ε are nearly equal."""
    values = _spends(results)
    if _spread(values) < _LEAST_SPREAD:
        return None
    return _boxes(results, "spend", "ε of the clients", values)


def spend_sentence(results: Results) -> str | None:
    """Return a sentence on how much the clients' ε differ in a variant; None if no ε is finite."""
    values = _spends(results)
    if not values:
        return None
    if all(epsilon_text(max(spent)) == epsilon_text(min(spent)) for spent in values.values()):
        return "In each variant all clients have the same ε."
    most = percent_text(_spread(values))
    return f"In each variant the ε of the clients differ by at most {most}."


def _spends(results: Results) -> dict[str, list[float]]:
    """Return the finite ε of all clients, by variant."""
    epsilons: dict[str, list[float]] = {}
    for variant in results.variants:
        rows = [row for run in variant.finished_runs if run.is_private for row in run.clients]
        if spent := [row["epsilon"] for row in rows if row["epsilon"] is not None]:
            epsilons[variant.name] = spent
    return epsilons


def _spread(values: Mapping[str, Sequence[float]]) -> float:
    """Return the largest relative difference between the ε of one variant's clients."""
    shares = [1 - min(spent) / max(spent) for spent in values.values() if max(spent)]
    return max(shares, default=0.0)


def _boxes(
    results: Results, name: str, title: str, values: Mapping[str, Sequence[float]], metric: str = ""
) -> Picture | None:
    """Return box plots of quartiles, with whiskers to the smallest and largest value."""
    looks, value_text = looks_of(results), partial(metric_text, metric) if metric else epsilon_text
    rows = {
        variant: (len(numbers), *np.percentile(numbers, _QUARTILES).tolist())
        for variant, numbers in values.items()
        if numbers
    }
    if not rows:
        return None
    marks, words = list[Mark](), list[str]()
    for row, (variant, (n, *quartiles)) in enumerate(rows.items()):
        low, _, middle, _, high = map(value_text, quartiles)
        tip = f"{variant}: median {middle}, {low} to {high}, {n:,} clients"
        marks += _box(row, quartiles, looks[variant].ink, tip)
        words.append(f"{variant} from {low} to {high}, median {middle}")
    prefix, every = common_words(list(rows)), [end for _, *ends in rows.values() for end in ends]
    x = number_axis((0.0, 1.05 * max(every)), title, grid=True)
    if metric:
        x = metric_axis(metric, every, title, most=5)
    shown = [shortened(name.removeprefix(prefix), _MAX_NAME_CHARACTERS) for name in rows]
    y = Axis(len(rows) - 0.5, -0.5, dict(enumerate(shown)), prefix.removesuffix("="))
    heading, label = _PRIVATE if metric else "", f"{title} of all runs: {'; '.join(words)}"
    height = _ROW_PIXELS * len(rows)
    return Picture(
        figure_name(results, name),
        f"{capital(title)}: quartiles and extremes",
        Chart(label, x, y, marks, height=height, right=18, heading=heading),
        ("variant", "clients", "minimum", "quartile_1", "median", "quartile_3", "maximum"),
        [(variant, *numbers) for variant, numbers in rows.items()],
    )


def _box(row: int, quartiles: Sequence[float], ink: str, tip: str) -> list[Mark]:
    low, first, middle, third, high = quartiles
    corners = [(first, row - 0.28), (third, row - 0.28), (third, row + 0.28), (first, row + 0.28)]
    median = Line([(middle, row - 0.28), (middle, row + 0.28)], ink, 2.4, tip=tip)
    return [*interval(row, (low, high), ink, across=True), Area(corners, ink, 0.35), median]

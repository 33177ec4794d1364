"""The report's overview: headline figures, curves over rounds and costs, and times."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from fedsim.core.errors import InputError
from fedsim.core.formatting import count_text, delta_text, duration_text, epsilon_text, metric_text
from fedsim.core.metrics import metric_entry, metric_name
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.report.chart import Chart
from fedsim.report.contents import RunContents, quoted, recall_text
from fedsim.report.drawing import inline_svg
from fedsim.report.experiment import sizes_text
from fedsim.report.plots import Curve, Over, common_target
from fedsim.runs.recorded_figures import PERSONALIZATION
from fedsim.server.round_report import numbers_of
from fedsim.statement.facts import Outcome
from fedsim.statement.guarantee import against_text, is_plain, stated_certificates, unit_text
from fedsim.statement.sentence import OBSERVER_NAMES

_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_TIMES = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_LONG = 3  # smallest axis end in a unit: below it, a smaller unit has better ticks

Drawings = list[tuple[str, Markup]]  # (caption, SVG drawing)


def _over_rounds(contents: RunContents) -> Over:
    rounds = [row["round"] for row in contents.rounds]
    return Over("round", rounds, lambda number: f"round {number:,.0f}", whole=True)


def round_drawings(contents: RunContents) -> Drawings:
    """Return a drawing of each curve over the rounds: metrics, losses, ε and noise."""
    over, metrics = _over_rounds(contents), [*contents.metrics]
    loss = ["test_loss"] if "test_loss" in metrics[1:] else []
    trained = [name for name in TRAIN_METRICS if any(name in row for row in contents.rounds)]
    names = metrics[:1] + loss + [*contents.client_metrics][:1] + trained
    curves = [_metric_curve(contents, name, over) for name in names]
    if contents.facts.is_bounded:
        curves.append(_epsilon_curve(contents, over))
    if (noise := noise_curve(contents, over)) is not None:
        curves.append(noise)
    return _drawn((curve.label, curve) for curve in curves)


def metric_chart(contents: RunContents, metric: str | None = None) -> Chart:
    """Return the chart of a metric of `rounds.jsonl` (None: the main one), or of `epsilon_max`.

    If no round has a finite number of this name, an InputError lists the names.
    """
    name = metric or next(iter(contents.metrics), "")
    over = _over_rounds(contents)
    rows = [numbers_of(row, ("test_", "clients_")) for row in contents.rounds]
    curves = {key: _metric_curve(contents, key, over) for row in rows for key in row}
    if contents.facts.is_bounded:
        curves["epsilon_max"] = _epsilon_curve(contents, over)
    chart = curves[name].chart() if name in curves else None
    if chart is None:
        known = ", ".join(curves) or "no finished round"
        raise InputError(f"the run has no numbers of {name!r} to draw; it has {known}")
    return chart


def cost_drawings(contents: RunContents) -> Drawings:
    """Return a drawing of the main metric against each recorded cost: ε, traffic and time."""
    if len(contents.rounds) < 2 or not contents.metrics:
        return []
    name, costs = next(iter(contents.metrics)), _costs(contents)
    return _drawn((f"against {cost}", _metric_curve(contents, name, over)) for cost, over in costs)


def _drawn(curves: Iterable[tuple[str, Curve]]) -> Drawings:
    charts = [(caption, curve.chart()) for caption, curve in curves]
    return [(caption, inline_svg(chart)) for caption, chart in charts if chart is not None]


def _costs(contents: RunContents) -> Iterator[tuple[str, Over]]:
    """Yield (name, axis) of each cost that the run recorded."""
    epsilons = [row["epsilon_max"] for row in contents.rounds]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    if contents.facts.is_bounded and len(known) == len(epsilons):
        yield "ε", Over("ε", known, lambda value: f"ε {epsilon_text(value)}")
    traffic = [row.get("traffic") for row in contents.rounds]
    sent = list(accumulate(counts["down"] + counts["up"] for counts in traffic if counts))
    if len(sent) == len(traffic):  # not recorded where participation is secret
        unit, size = _unit(sent[-1], _BYTES)
        label, amounts = f"{unit} sent and received", [count / size for count in sent]
        yield "communication", Over(label, amounts, lambda value: f"{value:.4g} {unit}")
    seconds = list(accumulate(row["seconds"] for row in contents.rounds))
    if seconds[-1] > 0:  # not recorded where participation is secret
        period, length = _unit(seconds[-1], _TIMES)
        times = [moment / length for moment in seconds]
        yield "time", Over(period, times, lambda value: duration_text(value * length))


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the name and size of the unit for an axis from 0 to `largest`."""
    return next((unit for unit in units if largest >= _LONG * unit[1]), units[-1])


def _metric_curve(contents: RunContents, name: str, over: Over) -> Curve:
    whose = "Clients' held-out" if name.startswith("clients_") else "Test"
    return Curve(
        label=f"{'Train' if name in TRAIN_METRICS else whose} {metric_name(name)}",
        over=over,
        values=[row.get(name) for row in contents.rounds],
        text=lambda value: metric_text(name, value),
        percent=metric_entry(name).in_percent,
    )


def _epsilon_curve(contents: RunContents, over: Over) -> Curve:
    return Curve(
        label=f"Largest ε of any client{against_text(contents.facts)}",
        over=over,
        values=[row["epsilon_max"] for row in contents.rounds],
        text=epsilon_text,
        target=common_target(contents.facts.clients),
        from_zero=True,
    )


def noise_curve(contents: RunContents, over: Over) -> Curve | None:
    """Return the curve of the noise-to-signal ratio of a round's average update, if it is known.

    The update u is the sum of a signal s and noise of expected length n, so ‖u‖² ≈ ‖s‖² + n². The
    ratio is n² / ‖s‖². In d dimensions, the squared length of the noise deviates from n² by about
    n² √(2 / d). A signal whose squared length is below this deviation cannot be told from noise. So
    the ratio is at most √(d / 2).
    """
    size = contents.sizes.get("trained_parameters")
    if not size:
        return None
    least = math.sqrt(2 / size)
    norms = [(row.get("update_norm"), row.get("noise_norm")) for row in contents.rounds]
    ratios = [
        None if update is None or not noise else 1 / max((update / noise) ** 2 - 1.0, least)
        for update, noise in norms
    ]
    return Curve(
        label="Noise-to-signal ratio",
        over=over,
        values=ratios,
        text="{:.3g}".format,
        target=1 / least,
        target_text="noise alone",
        logarithmic=True,
    )


_MIN_REST_SHARE = 0.005  # share of the time below which the rest is not listed


@dataclass(frozen=True)
class Card:
    """A headline figure of the report: a label, a value as text, and a line of detail below."""

    label: str
    value: str
    detail: str = ""
    kind: str = ""


def cards(contents: RunContents) -> list[Card]:
    """Return the headline figures of the report, the most important ones first."""
    sizes = sizes_text(contents) or "each protected as a whole"
    planned = contents.planned_rounds
    of = "" if planned is None else f"of {planned:,} planned"
    return [
        *_score_cards(contents),
        *_guarantee_cards(contents),
        *_recall_cards(contents),
        Card("Clients", f"{len(contents.clients):,}", sizes),
        Card("Rounds", f"{contents.summary['rounds']:,}", of),
        _time_card(contents),
    ]


def _time_card(contents: RunContents) -> Card:
    if not contents.has_times:
        return Card("Time", "not recorded", "it would tell how many clients took part")
    seconds, setup = contents.summary["seconds"], sum(contents.setup.values())
    detail = f"wall clock, {duration_text(setup)} of it set-up" if setup else "wall clock"
    return Card("Time", duration_text(seconds + setup), detail)


def _score_cards(contents: RunContents) -> Iterator[Card]:
    """Yield the cards of test metrics, of metrics on held-out examples, and of personal models."""
    if not contents.metrics:
        yield Card("Test metrics", "none", "no round was finished")
    else:
        (name, value), *others = contents.metrics.items()
        details = [f"{metric_name(key)} {metric_text(key, other)}" for key, other in others]
        scores, kind = contents.scores, ""
        if scores is not None:
            details[:0] = [scores.baseline] if name == "test_accuracy" and scores.baseline else []
            kind = "none" if scores.warnings else ""
        yield Card(f"Test {metric_name(name)}", metric_text(name, value), ", ".join(details), kind)
    if contents.client_metrics:
        (name, value), *_ = contents.client_metrics.items()
        asked = contents.rounds[-1].get("evaluated")
        clients, examples = (len(asked["clients"]), asked["examples"]) if asked else (0, 0)
        detail = f"{examples:,} held-out examples of {count_text(clients, 'client')}"
        yield Card(f"Clients' {metric_name(name)}", metric_text(name, value), detail)
    personal = contents.optional(PERSONALIZATION)
    if personal is not None and (scores := personal["personal"]):
        name = "accuracy" if "accuracy" in scores else next(iter(scores))
        others = metric_text(name, personal["global"][name])
        detail = f"public data; global model {others} on the same held-out examples"
        yield Card(f"Personal {metric_name(name)}", metric_text(name, scores[name]), detail)


def _recall_cards(contents: RunContents) -> Iterator[Card]:
    """Yield the card of the class with the lowest recall, among two or more."""
    scores = contents.scores
    if scores is not None and len(scores.by_recall) > 1:
        score = scores.by_recall[0]
        count = count_text(score.examples, "example")
        detail = f"{scores.noun} {quoted(score.name)}: {score.hits:,} of {count}"
        kind = "none" if score.is_missed else ""
        yield Card("Lowest recall", recall_text(score.recall), detail, kind)


_UNBOUNDED: Mapping[Outcome, Card] = {
    "no privacy": Card("Guarantee", "none", "no differential privacy", kind="none"),
    "infinite": Card("Guarantee", "ε = ∞", "no bound for the federation", kind="none"),
    "withheld": Card("Guarantee", "none", "the reported ε is not supported", kind="none"),
    "nothing released": Card("Guarantee", "ε = 0", "nothing was released", kind="guarantee"),
}


def _guarantee_cards(contents: RunContents) -> Iterator[Card]:
    """Yield a card for each certificate of an observer, after one with the reason for none."""
    facts = contents.facts
    if not facts.is_bounded:
        yield _UNBOUNDED[facts.outcome]
    whom = f"largest of {count_text(len(facts.clients), 'client')}"
    for one in stated_certificates(facts):
        label, detail = "Guarantee", f"at δ = {delta_text(one['delta'])}, {whom}"
        if not is_plain(facts):
            label += f" against {OBSERVER_NAMES[one['against']]}"
            detail += f", for {unit_text(facts)}"
        yield Card(label, f"ε ≤ {epsilon_text(one['epsilon'])}", detail, "guarantee")


def phases(contents: RunContents) -> list[tuple[str, str, float]]:
    """Return (name, time, share of the run) of its parts, such as loading data or training."""
    totals = Counter(contents.setup)
    for row in contents.rounds:
        totals.update(row.get("timeline", {}))
    known, seconds = sum(totals.values()), contents.summary["seconds"]
    whole = max(known, seconds + sum(contents.setup.values()))
    if whole <= 0:
        return []
    rest = whole - known
    if totals and rest > _MIN_REST_SHARE * whole:
        totals["everything else"] = rest
    return [(name, duration_text(value), value / whole) for name, value in totals.items()]

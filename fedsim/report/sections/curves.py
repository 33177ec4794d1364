"""The curves of the report: metrics over the rounds, and over what they cost."""

import math
from collections.abc import Iterator
from itertools import accumulate

from markupsafe import Markup

from fedsim.core.formatting import duration_text, epsilon_text, metric_text
from fedsim.core.metrics import metric_entry, metric_name
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.report.contents import RunContents
from fedsim.report.plots import Axis, Curve, Spend, common_target, draw_curve, round_axis
from fedsim.statement import Facts
from fedsim.statement.guarantee import is_plain
from fedsim.statement.observers import OBSERVER_NAMES

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0))
_LONG = 3  # of a unit: below, the smaller one has more telling ticks

Drawings = list[tuple[str, Markup]]


def round_drawings(contents: RunContents) -> Drawings:
    """Return captions and drawings of metrics, losses and ε over the rounds."""
    if not contents.rounds:
        return []
    over = round_axis([row["round"] for row in contents.rounds])
    curves = [_metric_curve(contents, name, over) for name in _plotted_metrics(contents)]
    curves += [_metric_curve(contents, name, over) for name in _train_metrics(contents)]
    if contents.facts.is_bounded:
        curves.append(_epsilon_curve(contents, over))
    noise = noise_curve(contents, over)
    return _drawn(curves if noise is None else [*curves, noise])


def cost_drawings(contents: RunContents) -> Drawings:
    """Return captions and drawings of the main metric against ε, communication and time."""
    if len(contents.rounds) < 2 or not contents.metrics:
        return []
    name = next(iter(contents.metrics))
    curves = []
    for words, over in _costs(contents):
        curve = _metric_curve(contents, name, over)
        curves.append((f"against {words}", curve))
    return [(caption, drawing) for caption, curve in curves for _, drawing in _drawn([curve])]


def spends_of(contents: RunContents) -> list[Spend]:
    """Return the ε and target of every client, to draw."""
    return [
        Spend(spend["client"], spend["epsilon"], spend.get("target_epsilon"))
        for spend in contents.clients
    ]


def _drawn(curves: list[Curve]) -> Drawings:
    drawings = [(curve.label, draw_curve(curve)) for curve in curves]
    return [(label, drawing) for label, drawing in drawings if drawing is not None]


def _costs(contents: RunContents) -> Iterator[tuple[str, Axis]]:
    """Yield the words and the axis of each cost that the run recorded."""
    epsilons = [row["epsilon_max"] for row in contents.rounds]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    if contents.facts.is_bounded and len(known) == len(epsilons):
        yield "ε", Axis("ε", known, lambda value: f"ε {epsilon_text(value)}")
    traffic = [row.get("traffic") for row in contents.rounds]
    known_traffic = [one["down"] + one["up"] for one in traffic if one]
    if len(known_traffic) == len(traffic):  # not recorded where participation is secret
        yield "communication", _traffic_axis(list(accumulate(known_traffic)))
    seconds = list(accumulate(row["seconds"] for row in contents.rounds))
    if seconds[-1] > 0:  # not recorded where participation is secret
        unit, size = _unit(seconds[-1], _TIME_UNITS, ("seconds", 1.0))
        yield (
            "time",
            Axis(unit, [s / size for s in seconds], lambda value: duration_text(value * size)),
        )


def _traffic_axis(sent: list[int]) -> Axis:
    unit, size = _unit(sent[-1], _UNITS, ("bytes", 1.0))
    return Axis(
        f"{unit} sent and received", [one / size for one in sent], lambda v: f"{v:.4g} {unit}"
    )


def _unit(
    largest: float, units: tuple[tuple[str, float], ...], smallest: tuple[str, float]
) -> tuple[str, float]:
    """Return name and size of the unit for an axis up to `largest`."""
    return next((unit for unit in units if largest >= _LONG * unit[1]), smallest)


def _plotted_metrics(contents: RunContents) -> list[str]:
    names = list(contents.metrics)
    loss = ["test_loss"] if "test_loss" in names[1:] else []
    return names[:1] + loss + list(contents.client_metrics)[:1]


def _train_metrics(contents: RunContents) -> list[str]:
    """Return the metrics of clients that a secure sum aggregated."""
    return [name for name in TRAIN_METRICS if any(name in row for row in contents.rounds)]


def _metric_curve(contents: RunContents, name: str, over: Axis) -> Curve:
    whose = "Test"
    if name in TRAIN_METRICS:
        whose = "Train"
    elif name.startswith("clients_"):
        whose = "Clients' held-out"
    return Curve(
        label=f"{whose} {metric_name(name)}",
        over=over,
        values=[row.get(name) for row in contents.rounds],
        text=lambda value: metric_text(name, value),
        percent=metric_entry(name).in_percent,
    )


def _epsilon_curve(contents: RunContents, over: Axis) -> Curve:
    return Curve(
        label=_epsilon_label(contents.facts),
        over=over,
        values=[row["epsilon_max"] for row in contents.rounds],
        text=epsilon_text,
        target=common_target(spends_of(contents)),
        from_zero=True,
    )


def noise_curve(contents: RunContents, over: Axis) -> Curve | None:
    """Return the noise-to-signal ratio of the update of each round; None where it is not known.

    The update u is signal and independent noise, ‖u‖² ≈ ‖signal‖² + n², with the expected length n
    of the noise; the ratio is n² / ‖signal‖². In d dimensions the squared length of the noise
    deviates by a share of √(2 / d). So a signal of less cannot be told from none, and the ratio
    has a largest value.
    """
    lengths = [(row.get("update_norm"), row.get("noise_norm")) for row in contents.rounds]
    size = (contents.summary.get("sizes") or {}).get("trained_parameters")
    if not size or not any(update is not None and noise for update, noise in lengths):
        return None
    least = math.sqrt(2 / size)
    return Curve(
        label="Noise-to-signal ratio",
        over=over,
        values=[
            None if update is None or not noise else _ratio(update / noise, least)
            for update, noise in lengths
        ],
        text=lambda value: f"{value:.3g}",
        target=1 / least,
        target_text="noise alone",
        logarithmic=True,
    )


def _ratio(length: float, least: float) -> float:
    """Return noise over signal, both squared, from the length of an update over that of noise."""
    return 1 / max(length**2 - 1.0, least)


def _epsilon_label(facts: Facts) -> str:
    if is_plain(facts):
        return "Largest ε of any client"
    return f"Largest ε of any client, against {OBSERVER_NAMES[facts.trust.observers[0]]}"

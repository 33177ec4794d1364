"""ε by several bounds in the terminal and as CSV."""

from collections.abc import Sequence

from rich.console import Console

from fedsim.core.formatting import epsilon_text
from fedsim.core.text_formats import csv_text
from fedsim.planning.bounds import BoundCurve
from fedsim.report.lines import print_sentence
from fedsim.report.tables import figure_table, print_table

_MAX_KINDS = 20
_MAX_NAMED_CLIENTS = 3


def print_bound_curve(curve: BoundCurve, console: Console | None = None) -> None:
    """Print ε of one schedule, a line for each number of steps."""
    console = console or Console()
    labels = [bound.label for bound in curve.bounds]
    table = figure_table(f"ε of DP-SGD: {curve.schedule.text}", ["steps", *labels])
    for steps, epsilons in curve.points:
        table.add_row(f"{steps:,}", *map(_cell, epsilons))
    print_table(console, table)
    _print_key(curve, console)


def print_client_kinds(curves: Sequence[BoundCurve], console: Console | None = None) -> None:
    """Print ε of all planned steps, a line for each kind of clients."""
    console = console or Console()
    if not curves:
        print_sentence(console, "no client takes a step, so nothing is charged")
        return
    several = len({curve.schedule.delta for curve in curves}) > 1
    labels = [bound.label for bound in curves[0].bounds]
    table = figure_table(
        "ε of all planned steps by different bounds",
        ["q", "z", "steps", *["δ"] * several, *labels],
        texts=["clients"],
    )
    shown = sorted(curves, key=lambda curve: -curve.smallest)[:_MAX_KINDS]
    for curve in sorted(shown, key=lambda curve: curve.schedule.clients):
        schedule = curve.schedule
        table.add_row(
            _clients(schedule.clients),
            f"{schedule.sampling_rate:.4g}",
            f"{schedule.noise_multiplier:.4g}",
            f"{schedule.steps:,}",
            *[f"{schedule.delta:g}"] * several,
            *map(_cell, curve.last),
        )
    notes = []
    if not several:
        notes.append(f"δ = {curves[0].schedule.delta:g} for all")
    if len(curves) > len(shown):
        notes.append(f"the {len(shown)} largest of {len(curves):,}; --json has all")
    table.caption = "\n".join(notes)
    print_table(console, table)
    _print_key(curves[0], console)


def bounds_csv(curves: Sequence[BoundCurve]) -> str:
    """Return ε as CSV: a line for each schedule and number of steps."""
    names = [bound.name for bound in curves[0].bounds] if curves else []
    rows: list[list[object]] = []
    for curve in curves:
        schedule = curve.schedule
        facts = (schedule.sampling_rate, schedule.noise_multiplier, schedule.delta)
        for steps, epsilons in curve.points:
            rows.append([" ".join(map(str, schedule.clients)), *facts, steps, *epsilons])
    columns = ["clients", "sampling_rate", "noise_multiplier", "delta", "steps", *names]
    return csv_text(columns, rows)


def _cell(epsilon: float | None) -> str:
    return "–" if epsilon is None else epsilon_text(epsilon)


def _clients(clients: Sequence[int]) -> str:
    if len(clients) <= _MAX_NAMED_CLIENTS:
        return ", ".join(map(str, clients))
    return f"{clients[0]} and {len(clients) - 1:,} more"


def _print_key(curve: BoundCurve, console: Console) -> None:
    words = "; ".join(f"{bound.label}: {bound.description}" for bound in curve.bounds)
    print_sentence(console, f"{words}. Each is an upper bound of the same releases")
    if any(epsilon is None for _, epsilons in curve.points for epsilon in epsilons):
        print_sentence(
            console,
            "–: the theorem does not cover these releases: their sampling has no amplification for "
            "pairs, or their noise differs",
        )

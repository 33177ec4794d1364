"""Printing of a privacy plan in the terminal, before any training."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from rich.console import Console

from fedsim.core.formatting import clients_text, count_text, delta_text, epsilon_text, range_text
from fedsim.core.text_formats import csv_text
from fedsim.planning.alternatives import OBSERVERS, PlannedCell, PlannedCorrelation
from fedsim.planning.bounds import BoundCurve
from fedsim.planning.projection import Plan, PlannedClient
from fedsim.report.terminal import (
    client_text,
    figure_table,
    most_spent,
    print_sentence,
    print_table,
)

_MAX_KINDS = 20
_MAX_NAMED_CLIENTS = 3


def print_bound_curve(curve: BoundCurve) -> None:
    """Print a table of ε over the number of steps; each column is another upper bound on ε."""
    console = Console()
    labels = [bound.label for bound in curve.bounds]
    table = figure_table(f"ε of DP-SGD: {curve.schedule.text}", ["steps", *labels])
    for steps, epsilons in curve.points:
        table.add_row(f"{steps:,}", *map(_cell, epsilons))
    print_table(console, table)
    _print_key(curve, console)


def print_client_kinds(curves: Sequence[BoundCurve], console: Console | None = None) -> None:
    """Print a table of each client's ε after all planned steps, by several upper bounds.

    Clients with equal plans share a row. Of many plans, those with the largest ε are printed.
    """
    console = console or Console()
    if not curves:
        print_sentence(console, "no client takes a step, so nothing is charged")
        return
    several = len({curve.schedule.delta for curve in curves}) > 1
    headings = ["q", "z", "steps", *["δ"] * several, *(bound.label for bound in curves[0].bounds)]
    title = "ε of all planned steps by different bounds"
    table = figure_table(title, headings, texts=["clients"])
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
    notes = [f"δ = {curves[0].schedule.delta:g} for all"] * (not several)
    table.caption = "\n".join(notes + _largest_of(len(shown), len(curves)))
    print_table(console, table)
    _print_key(curves[0], console)


def bounds_csv(curves: Sequence[BoundCurve]) -> str:
    """Return CSV text of ε by several upper bounds: a row for each schedule and number of steps."""
    names = [bound.name for bound in curves[0].bounds] if curves else []
    facts = ("sampling_rate", "noise_multiplier", "delta")
    values = attrgetter(*facts)
    rows = (
        [" ".join(map(str, curve.schedule.clients)), *values(curve.schedule), steps, *epsilons]
        for curve in curves
        for steps, epsilons in curve.points
    )
    return csv_text(["clients", *facts, "steps", *names], rows)


def _largest_of(shown: int, count: int) -> list[str]:
    return [f"the {shown} largest of {count:,}; --json has all"] * (count > shown)


def _cell(epsilon: float | None) -> str:
    return "–" if epsilon is None else epsilon_text(epsilon)


def _clients(clients: Sequence[int]) -> str:
    if len(clients) <= _MAX_NAMED_CLIENTS:
        return ", ".join(map(str, clients))
    return f"{clients[0]} and {len(clients) - 1:,} more"


def _print_key(curve: BoundCurve, console: Console) -> None:
    words = "; ".join(f"{bound.label}: {bound.description}" for bound in curve.bounds)
    print_sentence(console, f"{words}. Each is an upper bound of the same releases")
    if any(None in epsilons for _, epsilons in curve.points):
        print_sentence(
            console,
            "–: the theorem does not cover these releases: their sampling has no amplification for "
            "pairs, or their noise differs",
        )


_NOISE = {"local": "each client", "distributed": "each a share", "central": "the server"}
_KEY = (
    "* as in the file; z: noise multiplier in the client's own bound; ε: the largest of any "
    "client, against who sees each upload (server), sums alone, or global models alone; trusted: "
    "no noise protects from this observer"
)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a privacy plan: the clients with the largest ε, and the effect of changed settings."""
    console = console or Console()
    budgets = any(client.target_epsilon is not None for client in plan.clients)
    sizes = any(client.examples for client in plan.clients)  # else they are private
    headings = ["client", *["examples"] * sizes, "q", "z", "rounds", "steps", "ε"]
    headings += ["budget", "affords", "until"] * budgets
    table = figure_table("Planned for each client", headings)
    shown = most_spent(plan.clients, [client.epsilon for client in plan.clients])
    for client in shown:
        table.add_row(
            client_text(client.client, client.name),
            *[str(client.examples)] * sizes,
            f"{client.sampling_rate:.4g}",
            f"{client.noise_multiplier:.4g}",
            str(client.rounds),
            str(client.steps),
            epsilon_text(client.epsilon),
            *_budget_cells(client) * budgets,
        )
    notes = ["q: sampling rate; z: noise multiplier; ε: after all steps"]
    if budgets:
        notes.append("affords: number of rounds within the budget; until: last round of training")
    notes += _largest_of(len(shown), len(plan.clients))
    notes += [] if plan.note is None else [plan.note]
    table.caption = "\n".join(notes)
    print_table(console, table)
    title = f"Effect of one changed setting on the median client, {plan.median_client}"
    changes = figure_table(title, ["noise z", "steps", "ε at the end"], texts=["change"])
    for one in plan.variations:
        noise, epsilon = f"{one.noise_multiplier:.4g}", epsilon_text(one.epsilon)
        changes.add_row(one.change, noise, str(one.steps), epsilon)
    print_table(console, changes)
    if plan.bounds is not None:
        print_client_kinds(plan.bounds, console)
    print_cells(plan.cells, console)
    if plan.correlations:
        print_correlations(plan.correlations, console)
    goal = "" if plan.target_epsilon is None else f" (target {plan.target_epsilon:g})"
    rho = "" if plan.rho is None else f", and ρ = {plan.rho:.4g} of zCDP, its target"
    print_sentence(
        console,
        f"largest ε = {epsilon_text(plan.system_epsilon)}{goal} at δ = {delta_text(plan.delta)}"
        f"{rho}; no training was done",
    )
    for warning in plan.warnings:
        print_sentence(console, f"warning: {warning}", style="yellow")


def _budget_cells(client: PlannedClient) -> list[str]:
    rounds, target = client.affordable_rounds, client.target_epsilon
    if target is None:
        return ["–", "–", str(client.last_round)]
    return [f"{target:g}", "any" if rounds is None else str(rounds), str(client.last_round)]


def print_cells(cells: tuple[PlannedCell, ...], console: Console) -> None:
    """Print with which pairs of trust model and privacy unit the experiment could run.

    A pair has its noise and its ε against each adversary, or the reason why it is impossible.
    """
    title = "Trust models and units that this experiment can run in"
    numbers, texts = ["z", "ε: server", "sums", "models"], ["unit", "trust", "noise by"]
    table = figure_table(title, numbers, texts=texts)
    for cell in cells:
        if cell.reason is not None:
            continue
        noises = [client.noise_multiplier for client in cell.clients]
        epsilons = (cell.epsilon(observer) for observer in OBSERVERS)
        table.add_row(
            cell.unit,
            cell.trust + (" *" if cell.is_own else ""),
            _NOISE[cell.trust],
            range_text(noises, digits=3) if noises else "–",
            *("trusted" if epsilon is None else epsilon_text(epsilon) for epsilon in epsilons),
        )
    print_table(console, table)
    for line in (_KEY, *_lines(cells)):
        print_sentence(console, line)


def print_correlations(planned: Sequence[PlannedCorrelation], console: Console) -> None:
    """Print the noise of the models of a run for each kind of correlation, at the same ε."""
    momentum = planned[0].momentum
    error = f"error with momentum {momentum:g}" if momentum else "error of sums"
    title, texts = "Noise of the models, at the same ε", ["noise_correlation", "participation"]
    table = figure_table(title, ["noise z", error], texts=texts)
    for row in planned:
        table.add_row(row.noise, row.scheme, f"{row.noise_multiplier:.4g}", f"{row.error:.4g}")
    table.caption = "error: root mean square over 1, 2, ... rounds, in max_update_norm"
    print_table(console, table)


def _lines(cells: tuple[PlannedCell, ...]) -> Iterator[str]:
    for cell in cells:
        name = f"{cell.unit}, {cell.trust}"
        if len(cell.strictest) == len(cell.clients):
            strictest = "the claim of all clients"
        else:
            strictest = f"the strictest claim, of {clients_text(cell.strictest)},"
        if cell.reason is not None:
            yield f"{name}: cannot run: {cell.reason.partition(';')[0]}"
        elif cell.trust == "distributed":
            shares = count_text(cell.honest or 0, "honest share")
            yield f"{name}: {strictest} sets every client's share; the smallest sum has {shares}"
        elif cell.trust == "central":
            yield f"{name}: {strictest} sets the server's noise"

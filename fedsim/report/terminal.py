"""What a person sees in the terminal: progress on stderr, the result on stdout."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from fedsim.federation import Federation
from fedsim.planning import Plan, PlannedClient
from fedsim.report.figures import epsilon_text, metric_text
from fedsim.run_directory import RunDirectory

_SHOWN_CLIENTS = 25


class ProgressObserver:
    """A bar over the rounds with the current metric and the largest ε; lines where no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._rounds = 0

    def started(self, federation: Federation, path: Path) -> None:
        """Say what is about to run, and start the bar."""
        experiment = federation.experiment
        self._rounds = experiment.federation.rounds
        self._console.print(_headline(federation), highlight=False)
        for warning in _warnings(federation):
            self._console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
        if self._console.is_terminal:
            self._task = self._progress.add_task("round", total=self._rounds, figures="")
            self._progress.start()

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Move the bar on, or print a line."""
        figures = _figures(row)
        for word, key in (("failed", "failed"), ("withdrew", "withdrawn")):
            for one in row[key]:
                self._console.print(
                    f"round {row['round']}: client {one['client']} {word}: {one['reason']}",
                    style="yellow",
                    highlight=False,
                    markup=False,
                )
        if self._task is not None:
            self._progress.update(self._task, completed=row["round"], figures=figures)
        else:
            self._console.print(f"round {row['round']}/{self._rounds}  {figures}", highlight=False)

    def ended(self) -> None:
        """Stop the bar."""
        if self._task is not None:
            self._progress.stop()


def print_result(directory: RunDirectory, console: Console | None = None) -> None:
    """Print the summary and the privacy table of a run directory."""
    console = console or Console()
    summary, privacy = directory.read_json("summary.json"), directory.read_json("privacy.json")
    if privacy["accountant"] is not None:
        console.print(_privacy_table(privacy["clients"]))
    console.print(_summary_line(summary, privacy), highlight=False)
    console.print(f"report: {directory.report}", highlight=False, markup=False, soft_wrap=True)


def _headline(federation: Federation) -> str:
    experiment = federation.experiment
    sizes = sorted(len(examples) for examples in federation.data.clients)
    parts = [
        f"[bold]{experiment.name}[/bold]: {federation.num_clients} clients with "
        f"{sizes[0]}-{sizes[-1]} examples, {len(federation.data.test)} test examples, "
        f"{experiment.federation.rounds} rounds of {experiment.local.steps} steps"
    ]
    if federation.plans is None:
        parts.append("no differential privacy")
    else:
        noise = sorted(plan.step.noise_multiplier for plan in federation.plans)
        deltas = sorted({plan.delta for plan in federation.plans})
        target = experiment.privacy.target_epsilon if experiment.privacy else None
        goal = f"target ε = {target:g}" if target is not None else "given noise"
        parts.append(
            f"DP-SGD in every client: {goal} at δ = {deltas[-1]:g}, "
            f"noise multiplier {noise[0]:.3g}-{noise[-1]:.3g}"
        )
    return "\n".join(parts)


def _warnings(federation: Federation) -> list[str]:
    if federation.plans is None:
        return []
    loose = [
        str(client)
        for client, plan in enumerate(federation.plans)
        if plan.delta * plan.examples >= 1
    ]
    if not loose:
        return []
    return [
        f"δ is not below 1 / examples for the clients {', '.join(loose[:10])}: such a δ allows a "
        "whole example to be published; use a smaller privacy.delta"
    ]


def _figures(row: Mapping[str, Any]) -> str:
    parts = [
        f"{name.removeprefix('test_')} {metric_text(name, value)}"
        for name, value in row.items()
        if name.startswith("test_") and name != "test_loss"
    ]
    if row["epsilon_max"] is not None:
        parts.append(f"ε ≤ {epsilon_text(row['epsilon_max'])}")
    return "  ".join(parts)


def _privacy_table(clients: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Privacy spent by each client", title_justify="left")
    headings = ["client", "examples", "z", "rounds", "steps", "δ", "ε", "ε (RDP)"]
    budgets = any(spend["target_epsilon"] is not None for spend in clients)
    left = any(spend["withdrawn_round"] is not None for spend in clients)
    headings += ["budget"] * budgets + ["left in"] * left
    for heading in headings:
        table.add_column(heading, justify="right")
    ordered = sorted(clients, key=lambda spend: -_number(spend["epsilon"]))
    shown = sorted(ordered[:_SHOWN_CLIENTS], key=lambda spend: spend["client"])
    for spend in shown:
        table.add_row(
            str(spend["client"]),
            str(spend["examples"]),
            f"{spend['noise_multiplier']:.4g}",
            str(spend["rounds"]),
            str(spend["steps"]),
            f"{spend['delta']:g}",
            epsilon_text(spend["epsilon"]),
            epsilon_text(spend["epsilon_rdp"]),
            *[_or_dash(spend["target_epsilon"])] * budgets,
            *[_or_dash(spend["withdrawn_round"])] * left,
        )
    notes = ["z: noise multiplier"]
    if left:
        notes.append("left in: the round in which it withdrew")
    if len(clients) > len(shown):
        notes.append(f"the {len(shown)} largest of {len(clients)}; clients.csv has all")
    table.caption = "; ".join(notes)
    return table


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _summary_line(summary: dict[str, Any], privacy: dict[str, Any]) -> str:
    metrics = ", ".join(
        f"{name.replace('_', ' ')} [bold]{metric_text(name, value)}[/bold]"
        for name, value in summary.items()
        if name.startswith("test_")
    )
    if privacy["accountant"] is None:
        guarantee = "no differential privacy"
    else:
        epsilon = epsilon_text(privacy["system_epsilon"])
        guarantee = f"every client within [bold]ε = {epsilon}[/bold] at δ = {summary['delta']:g}"
    left = sum(client.get("withdrawn_round") is not None for client in privacy["clients"])
    withdrew = f"; {left} of {len(privacy['clients'])} clients withdrew" if left else ""
    reason = f": {summary['reason']}" if summary["status"] == "stopped" else ""
    return (
        f"{summary['name']}: {summary['status']} after {summary['rounds']} rounds in "
        f"{summary['seconds']:.1f} s{reason}; {metrics or 'no round finished'}; "
        f"{guarantee}{withdrew}"
    )


def _number(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what every client would spend, and what one changed setting would do."""
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, title="Planned for each client", title_justify="left")
    headings = ["client", "examples", "q", "z", "rounds", "steps", "ε"]
    budgets = any(client.target_epsilon is not None for client in plan.clients)
    headings += ["budget", "affords", "until"] * budgets
    for heading in headings:
        table.add_column(heading, justify="right")
    ordered = sorted(plan.clients, key=lambda client: -client.epsilon)[:_SHOWN_CLIENTS]
    for client in sorted(ordered, key=lambda client: client.client):
        table.add_row(
            str(client.client),
            str(client.examples),
            f"{client.sampling_rate:.4g}",
            f"{client.noise_multiplier:.4g}",
            str(client.rounds),
            str(client.steps),
            epsilon_text(client.epsilon),
            *_budget_cells(client) * budgets,
        )
    notes = ["q: sampling rate; z: noise multiplier; ε: after all steps"]
    if budgets:
        notes.append("affords: rounds that the budget affords; until: its last round of training")
    if len(plan.clients) > len(ordered):
        notes.append(f"the {len(ordered)} largest of {len(plan.clients)}; --json has all")
    table.caption = "\n".join(notes)
    console.print(table)
    changes = Table(
        box=box.SIMPLE_HEAD,
        title=f"What would change for the median client, {plan.median_client}",
        title_justify="left",
    )
    changes.add_column("change")
    for heading in ("noise z", "steps", "ε at the end"):
        changes.add_column(heading, justify="right")
    for one in plan.variations:
        changes.add_row(
            one.change, f"{one.noise_multiplier:.4g}", str(one.steps), epsilon_text(one.epsilon)
        )
    console.print(changes)
    goal = "" if plan.target_epsilon is None else f" (target {plan.target_epsilon:g})"
    console.print(
        f"largest ε = [bold]{epsilon_text(plan.system_epsilon)}[/bold]{goal} "
        f"at δ = {plan.delta:g}; nothing was trained",
        highlight=False,
    )


def _budget_cells(client: PlannedClient) -> list[str]:
    rounds = client.affordable_rounds
    affords = "any number" if rounds is None else str(rounds)
    return [
        _or_dash(client.target_epsilon),
        "–" if client.target_epsilon is None else affords,
        str(client.last_round),
    ]

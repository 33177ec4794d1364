"""Terminal output on stdout: a plan."""

from rich.console import Console

from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.planning.projection import Plan, PlannedClient
from fedsim.report.bounds_table import print_client_kinds
from fedsim.report.cells_table import print_cells
from fedsim.report.lines import print_sentence
from fedsim.report.tables import MAX_TABLE_CLIENTS, client_text, figure_table, or_dash, print_table


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the planned spend of every client, and the effect of single changed settings."""
    console = console or Console()
    budgets = any(client.target_epsilon is not None for client in plan.clients)
    table = figure_table(
        "Planned for each client",
        ["client", "examples", "q", "z", "rounds", "steps", "ε"]
        + ["budget", "affords", "until"] * budgets,
    )
    ordered = sorted(plan.clients, key=lambda client: -client.epsilon)[:MAX_TABLE_CLIENTS]
    for client in sorted(ordered, key=lambda client: client.client):
        table.add_row(
            client_text(client.client, client.name),
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
        notes.append("affords: number of rounds within the budget; until: last round of training")
    if len(plan.clients) > len(ordered):
        notes.append(f"the {len(ordered)} largest of {len(plan.clients):,}; --json has all")
    if plan.note is not None:
        notes.append(plan.note)
    table.caption = "\n".join(notes)
    print_table(console, table)
    changes = figure_table(
        f"Effect of one changed setting on the median client, {plan.median_client}",
        ["noise z", "steps", "ε at the end"],
        texts=["change"],
    )
    for one in plan.variations:
        changes.add_row(
            one.change, f"{one.noise_multiplier:.4g}", str(one.steps), epsilon_text(one.epsilon)
        )
    print_table(console, changes)
    if plan.bounds is not None:
        print_client_kinds(plan.bounds, console)
    print_cells(plan.cells, console)
    goal = "" if plan.target_epsilon is None else f" (target {plan.target_epsilon:g})"
    print_sentence(
        console,
        f"largest ε = {epsilon_text(plan.system_epsilon)}{goal} at δ = {delta_text(plan.delta)}; "
        "no training was done",
    )


def _budget_cells(client: PlannedClient) -> list[str]:
    rounds = client.affordable_rounds
    affords = "any" if rounds is None else str(rounds)
    return [
        or_dash(client.target_epsilon),
        "–" if client.target_epsilon is None else affords,
        str(client.last_round),
    ]

"""Terminal output on stdout: a plan, with the trust models and units that it can run in."""

from collections.abc import Iterator

from rich.console import Console

from fedsim.core.formatting import clients_text, count_text, delta_text, epsilon_text, range_text
from fedsim.planning.cells import OBSERVERS, PlannedCell
from fedsim.planning.projection import Plan, PlannedClient
from fedsim.report.bounds_table import print_client_kinds
from fedsim.report.lines import print_sentence
from fedsim.report.tables import MAX_TABLE_CLIENTS, client_text, figure_table, or_dash, print_table

_NOISE = {"client": "each client", "share": "each a share", "server": "the server"}
_KEY = (
    "* as in the file; z: noise multiplier in the client's own bound; ε: the largest of any "
    "client, against who sees each upload (server), sums alone, or global models alone; trusted: "
    "no noise protects from this observer"
)


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


def print_cells(cells: tuple[PlannedCell, ...], console: Console) -> None:
    """Print a line for each cell: the noise and the ε of each observer, or why it cannot run."""
    possible = [cell for cell in cells if cell.reason is None]
    table = figure_table(
        "Trust models and units that this experiment can run in",
        ["z", "ε: server", "sums", "models"],
        texts=["unit", "trust", "noise by"],
    )
    for cell in possible:
        table.add_row(
            cell.unit,
            cell.trust + (" *" if cell.is_own else ""),
            _NOISE[cell.noise_by],
            range_text(list(cell.noise_range), digits=3) if cell.clients else "–",
            *(_epsilon_cell(cell, observer) for observer in OBSERVERS),
        )
    print_table(console, table)
    for line in (_KEY, *_lines(cells)):
        print_sentence(console, line)


def _epsilon_cell(cell: PlannedCell, observer: str) -> str:
    epsilon = cell.epsilon(observer)
    return "trusted" if epsilon is None else epsilon_text(epsilon)


def _lines(cells: tuple[PlannedCell, ...]) -> Iterator[str]:
    for cell in cells:
        name = f"{cell.unit}, {cell.trust}"
        if cell.reason is not None:
            yield f"{name}: cannot run: {cell.reason.partition(';')[0]}"
        elif cell.trust == "distributed":
            yield (
                f"{name}: {_strictest(cell)} sets every client's share; the smallest sum has "
                f"{count_text(cell.honest or 0, 'honest share')}"
            )
        elif cell.trust == "central":
            yield f"{name}: {_strictest(cell)} sets the server's noise"


def _strictest(cell: PlannedCell) -> str:
    if len(cell.strictest) == len(cell.clients):
        return "the claim of all clients"
    return f"the strictest claim, of {clients_text(cell.strictest)},"

"""Trust models and units of `fedsim plan` in the terminal."""

from collections.abc import Iterator

from rich.console import Console

from fedsim.core.formatting import clients_text, count_text, epsilon_text, range_text
from fedsim.planning.cells import OBSERVERS, PlannedCell
from fedsim.report.lines import print_sentence
from fedsim.report.tables import figure_table, print_table

_NOISE = {"client": "each client", "share": "each a share", "server": "the server"}
_KEY = (
    "* as in the file; z: noise multiplier in the client's own bound; ε: the largest of any "
    "client, against who sees each upload (server), sums alone, or global models alone; trusted: "
    "no noise protects from this observer"
)


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

"""Printing of privacy totals in the terminal (`fedsim totals`)."""

from rich.console import Console

from fedsim.core.formatting import count_text, delta_text, epsilon_text
from fedsim.report.terminal import MAX_TABLE_CLIENTS, figure_table, print_sentence, print_table
from fedsim.statement.observers import OBSERVER_NAMES
from fedsim.tools.totals.sources import EVERYONE
from fedsim.tools.totals.totals import Totals
from fedsim.tools.totals.training import TrainingReport


def print_account(account: Totals) -> None:
    """Print the privacy total of each client, and a sentence on the largest total."""
    console = Console()
    names = list(account.clients[0].epsilons)
    deltas = {total.delta for total in account.clients}
    has_names = any(total.name for total in account.clients)
    has_server = any(total.epsilon_against_server is not None for total in account.clients)
    is_one = len(account.clients) == 1 and account.clients[0].client == EVERYONE
    if not is_one:
        table = figure_table(
            f"Privacy spent over {count_text(len(account.sources), 'source')}",
            ["runs or files", "releases", *["δ"] * (len(deltas) > 1)]
            + [f"ε ({name})" for name in names]
            + ["ε (server)"] * has_server,
            texts=["client", *["name"] * has_names],
        )
        shown = sorted(account.clients, key=lambda total: -total.epsilon)[:MAX_TABLE_CLIENTS]
        for total in (total for total in account.clients if total in shown):
            table.add_row(
                total.client,
                *[total.name or ""] * has_names,
                str(len(total.sources)),
                str(sum(count for _, count in total.ledger.entries)),
                *[delta_text(total.delta)] * (len(deltas) > 1),
                *[epsilon_text(value) for value in total.epsilons.values()],
                *[epsilon_text(total.epsilon_against_server)] * has_server,
            )
        print_table(console, table)
        if len(account.clients) > len(shown):
            print_sentence(console, f"of {len(account.clients)} clients, those with the largest ε")
    for sentence in _sentences(account):
        print_sentence(console, sentence)


def print_training(report: TrainingReport) -> None:
    """Print the ε that a training spends, and the ε that its authors claim, side by side."""
    console = Console()
    training = report.training
    accountants = [f"ε ({name})" for name in report.rows[0].epsilons]
    table = figure_table(report.name, accountants, texts=["training"])
    for row in report.rows:
        table.add_row(row.label, *map(epsilon_text, row.epsilons.values()))
    print_table(console, table)
    terms = f"for each {training.unit}, under {training.adjacency} adjacency"
    for sentence in (
        *report.sentences(),
        f"every ε is {terms}, at δ = {delta_text(training.delta)}",
    ):
        print_sentence(console, sentence)


def _sentences(account: Totals) -> list[str]:
    largest = account.largest
    epsilons = ", ".join(
        f"{epsilon_text(value)} ({name})" for name, value in largest.epsilons.items()
    )
    whose = f", of client {largest.client}" if largest.client else ""
    unit = "" if account.unit is None else f"for each {account.unit}, "
    against = "" if account.observer is None else f"against {OBSERVER_NAMES[account.observer]}, "
    lines = [
        f"largest ε = {epsilons} at δ = {delta_text(largest.delta)}{whose}",
        f"every ε is {unit}{against}under {account.adjacency} adjacency",
    ]
    if len(account.sources) > 1:
        lines.append(
            "an example may be in any client of each run: the partitions are drawn by their seeds"
            if account.is_of_any_client
            else "each total holds if the data of the client are the same in all of these"
        )
    lines += [
        f"{name} repeats another run bit for bit, and is counted once" for name in account.repeated
    ]
    lines += [
        f"{name} has not ended; it is counted up to its last record" for name in account.unfinished
    ]
    return lines

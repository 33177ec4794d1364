"""Privacy totals in the terminal, and as a draft entry of the public registry of deployments.

The keys of an entry are those of the template of 2026; facts that only people know stay empty.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.core.formatting import count_text, delta_text, epsilon_text
from fedsim.report.terminal import figure_table, most_spent, print_sentence, print_table
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.statement.sentence import OBSERVER_NAMES
from fedsim.tools.totals.sources import EVERYONE, Source, SourceError
from fedsim.tools.totals.totals import Totals
from fedsim.tools.totals.training import TrainingReport

_OF_ONE_RUN = frozenset(("guarantee", "result", "delta", "budget", "limit", "mechanism"))
_MODELS = {observer: trust.title() for trust, observer in CLAIMED_AGAINST.items()}


def print_account(account: Totals) -> None:
    """Print the privacy total of each client, and a sentence on the largest total."""
    console = Console()
    deltas = {total.delta for total in account.clients}
    has_names = any(total.name for total in account.clients)
    has_server = any(total.epsilon_against_server is not None for total in account.clients)
    is_one = len(account.clients) == 1 and account.clients[0].client == EVERYONE
    if not is_one:
        table = figure_table(
            f"Privacy spent over {count_text(len(account.sources), 'source')}",
            ["runs or files", "releases", *["δ"] * (len(deltas) > 1)]
            + [f"ε ({name})" for name in account.clients[0].epsilons]
            + ["ε (server)"] * has_server,
            texts=["client", *["name"] * has_names],
        )
        shown = most_spent(account.clients, [total.epsilon for total in account.clients])
        for total in shown:
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
    accountants = [f"ε ({name})" for name in report.rows[0].epsilons]
    table = figure_table(report.name, accountants, texts=["training"])
    for row in report.rows:
        table.add_row(row.label, *map(epsilon_text, row.epsilons.values()))
    print_table(console, table)
    for sentence in report.sentences():
        print_sentence(console, sentence)


def _sentences(account: Totals) -> Iterator[str]:
    largest = account.largest
    epsilons = ", ".join(f"{epsilon_text(e)} ({name})" for name, e in largest.epsilons.items())
    whose = f", of client {largest.client}" if largest.client else ""
    unit = "" if account.unit is None else f"for each {account.unit}, "
    against = "" if account.observer is None else f"against {OBSERVER_NAMES[account.observer]}, "
    yield f"largest ε = {epsilons} at δ = {delta_text(largest.delta)}{whose}"
    yield f"every ε is {unit}{against}under {account.adjacency} adjacency"
    if len(account.sources) > 1:
        yield (
            "an example may be in any client of each run: the partitions are drawn by their seeds"
            if account.is_of_any_client
            else "each total holds if the data of the client are the same in all of these"
        )
    for name in account.repeated:
        yield f"{name} repeats another run bit for bit, and is counted once"
    for name in account.unfinished:
        yield f"{name} has not ended; it is counted up to its last record"


def registry_entry(account: Totals, sources: Sequence[Source]) -> str:
    """Return a draft entry of the registry with the totals and facts on the last finished run.

    Guarantee: ε is rounded up and δ is the accounted one, so the entry claims no more privacy than
    the totals show.
    """
    runs = [source for source in sources if source.is_run and source.is_finished]
    if not runs:
        raise SourceError("--registry needs the directory of a run that has ended")
    if account.to_json()["system_epsilon"] is None:
        raise SourceError("--registry: the largest ε is infinite, which is nothing to register")
    last = RunFiles(RunDirectory.open(Path(runs[-1].name)))
    entry = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text(encoding="utf-8"))
    entry = _filled(entry, _facts(account, last))
    entry["deployment"]["privacy_loss"]["privacy_parameters"] = {
        "epsilon": float(epsilon_text(account.largest.epsilon)),
        "delta": account.largest.delta,
    }
    head = (
        "# A draft for https://registry.opendp.org, written by fedsim totals.\n"
        "# Fill in the empty fields, and check each sentence.\n"
    )
    if any(source.seed is not None for source in sources):
        head += (
            "# The noise was seeded: this was a simulation, not a deployment. Register a run with\n"
            "# privacy.noise: secure.\n"
        )
    return head + yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)


def _filled(value: Any, facts: Mapping[str, str]) -> Any:
    """Return a value of the template with facts in place of their names in braces."""
    if isinstance(value, dict):
        return {key: _filled(inner, facts) for key, inner in value.items()}
    return value.format_map(facts).strip() if isinstance(value, str) else value


def _facts(account: Totals, run: RunFiles) -> Mapping[str, str]:
    """Return the facts of an entry by name, and the sentences of the run's statement by topic."""
    facts = defaultdict[str, str](str)  # a statement does not have every topic
    for point in run.privacy.get("statement_points") or []:
        if len(account.sources) == 1 or point["point"] not in _OF_ONE_RUN:
            facts[point["point"]] += f"{point['text']} "
    metrics = [
        f"{key.replace('_', ' ')} {value:.4g}"
        for key, value in run.summary.items()
        if key.startswith("test_") and isinstance(value, float)
    ]
    name, largest = run.experiment.name, account.largest
    return facts | {
        "SLUG": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "deployment",
        "NAME": name,
        "UNIT": (account.unit or "example").title(),
        "MODEL": _MODELS.get(account.observer or "server", ""),
        "ACCOUNTANT": next(iter(largest.epsilons)),
        "CLIENTS": str(len(account.clients)),
        "RUNS": str(len(account.sources)),
        "RELEASES": str(sum(count for _, count in largest.ledger.entries)),
        "METRICS": ", ".join(metrics),
    }

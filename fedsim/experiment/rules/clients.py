"""Rules of the clients: how many there are, their weights, budgets and faults."""

from collections.abc import Iterator
from pathlib import Path

from fedsim.clients.client_settings import is_client
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.limits import MAX_LEDGER_RECORDS
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.references import check_table
from fedsim.experiment.rules.sections import Sections, messages_at


def check_participation(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in the number of clients of a round, and of charges of all rounds."""
    if sections.federation is None or sections.data is None:
        return
    per_round = sections.federation.clients_per_round
    clients = sections.num_clients
    if clients is None:
        return
    if per_round is not None and per_round > clients:
        path = ("federation", "clients_per_round")
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield path, f"{rule}, got {value_text(per_round)}"
    rounds = sections.federation.rounds
    charged = per_round or clients
    if sections.round_sizes is not None:
        charged = sections.round_sizes[1]
    if sections.federation.participation.scheme == "poisson" and sections.privacy is not None:
        charged = clients  # also those that were not drawn
    records = rounds * charged
    if records > MAX_LEDGER_RECORDS:
        yield (
            ("federation", "rounds"),
            f"{rounds:,} rounds of {charged:,} clients are {records:,} records of the "
            f"ledger, which holds at most {MAX_LEDGER_RECORDS:,}; lower rounds or "
            "clients_per_round",
        )


def check_weighting(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `federation.weighting`."""
    if sections.federation is None:
        return
    path: KeyPath = ("federation", "weighting")
    weights, privacy = sections.federation.weights, sections.privacy
    if weights.uses_sizes and privacy is not None and privacy.adjacency.name == "add_remove":
        other = ", size_power: 0" if weights.name == "noise" else ""
        yield (
            path,
            f"'{weights.name}' would reveal client sizes, which adjacency add_remove keeps "
            f"private; use weighting: uniform{other} or adjacency: zero_out",
        )
    if sections.round_sizes is None or weights.max_share is None:
        return
    clients, _ = sections.round_sizes
    if weights.max_share * clients < 1:
        yield (
            (*path, "max_share"),
            f"must be at least 1/{clients}, the share of each of the {clients} clients of a round "
            f"under equal weights, got {value_text(weights.max_share)}; raise it",
        )


def check_sampling_rate(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `privacy.sampling.rate`."""
    local, privacy = sections.local, sections.privacy
    if local is None or privacy is None or privacy.sampling.rate is None:
        return
    if local.batch_size == "full":
        rate = value_text(privacy.sampling.rate)
        yield (
            ("privacy", "sampling", "rate"),
            f"local.batch_size: full is a sampling rate of 1, and privacy.sampling.rate is {rate}; "
            "remove the rate, or write a number for batch_size",
        )


def check_budgets(sections: Sections) -> Iterator[PathMessage]:
    """Yield the clients with a budget that do not exist."""
    clients = sections.num_clients
    if sections.privacy is None or clients is None:
        return
    rule = _unknown_client(clients)
    for name, entry in sections.privacy.clients.items():
        path: KeyPath = ("privacy", "clients", name)
        if is_client(name) and int(name) >= clients:
            yield path, rule
        for position, member in enumerate(entry.members or ()):
            if member >= clients:
                yield (*path, "members", position), rule


def check_budget_files(privacy: PrivacySettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in the tables of budgets.

    Args:
        privacy: the `privacy` section.
        base: the directory in which relative paths start.
    """
    for name, entry in privacy.clients.items():
        if entry.csv is not None:
            yield from messages_at(
                ("privacy", "clients", name, "csv"), check_table(entry.csv, base)
            )


def check_faults(sections: Sections) -> Iterator[PathMessage]:
    """Yield the faults of clients that do not exist, and stragglers without a deadline."""
    clients = sections.num_clients
    for position, fault in enumerate(sections.faults):
        for place, client in enumerate(fault.clients or ()):
            if clients is not None and client >= clients:
                yield ("faults", position, "clients", place), _unknown_client(clients)
        no_deadline = sections.federation is not None and sections.federation.deadline is None
        if fault.kind == "straggler" and no_deadline:
            yield (
                ("faults", position),
                "a straggler needs a deadline to miss; set federation.deadline, in seconds",
            )


def _unknown_client(clients: int) -> str:
    return (
        f"no such client; use a number from 0 to {clients - 1} "
        f"(data.partition.num_clients is {clients})"
    )

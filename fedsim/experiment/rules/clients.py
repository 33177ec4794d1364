"""Rules of clients: their budgets and faults, and which of them take part in a round."""

from collections.abc import Iterator
from pathlib import Path

from fedsim.clients.client_settings import is_client
from fedsim.clients.mechanisms.conditions import unmet
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.limits import MAX_LEDGER_RECORDS
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.references import check_table
from fedsim.experiment.rules.sections import Sections, messages_at
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.participation.settings import (
    BufferedParticipation,
    CyclicParticipation,
    DurationTable,
    TraceParticipation,
)
from fedsim.server.settings import FederationSettings


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


_PARTICIPATION: KeyPath = ("federation", "participation")


def check_schemes(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes of a scheme that does not fit the clients, or the trust model."""
    if sections.federation is None:
        return
    match sections.federation.participation:
        case CyclicParticipation() as cyclic:
            yield from _check_groups(cyclic, sections)
        case TraceParticipation() as trace:
            yield from _check_trace(trace, sections)
        case BufferedParticipation() as buffered:
            yield from _check_buffer(buffered, sections)
            yield from _check_stale_updates(sections)
        case _:
            pass


def check_partial_work(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes of `federation.partial_work`: where no part of the work is defined."""
    federation, privacy, local = sections.federation, sections.privacy, sections.local
    if federation is None or federation.partial_work is None:
        return
    place: KeyPath = ("federation", "partial_work")
    settings = federation.partial_work
    if federation.participation.scheme == "poisson" and privacy is not None:
        yield (
            place,
            "names stragglers among the clients of a round, and private Poisson draws are secret; "
            "remove partial_work, or use participation: {scheme: uniform}",
        )
    if settings.on_partial == "drop":
        if sections.round_sizes is not None and sections.round_sizes[1] < 1:
            yield (
                place,
                f"share {settings.share:g} leaves out every client of a round; lower it, or use "
                "on_partial: keep",
            )
        return
    if local is not None and local.steps == 1:
        yield (
            place,
            "a round of one step has no part; set local.steps to 2 or more, or use on_partial: "
            "drop",
        )
    if privacy is None or privacy.noise != "secure":
        return
    if privacy.sampling.scheme.divides_rounds:
        yield (
            place,
            "secure noise divides the examples anew in rounds of equal length, and stragglers have "
            "shorter ones; use sampling: poisson, or on_partial: drop",
        )


def _check_groups(settings: CyclicParticipation, sections: Sections) -> Iterator[PathMessage]:
    clients, groups = sections.num_clients, settings.groups
    if clients is None:
        return
    if groups is not None and groups > clients:
        rule = f"must be at most {clients}, the number of clients, got {groups}"
        yield (*_PARTICIPATION, "groups"), rule
    if settings.members is None:
        return
    # Imported here, as below: numpy is slow to import, and most files do not need it.
    from fedsim.experiment.rules.schedules import first_difference

    if difference := first_difference(settings, clients):
        yield (*_PARTICIPATION, "members"), difference


def _check_trace(settings: TraceParticipation, sections: Sections) -> Iterator[PathMessage]:
    if sections.num_clients is None or settings.availability is None:
        return
    from fedsim.experiment.rules.schedules import unknown_client

    unknown = unknown_client(settings, sections.num_clients)
    if unknown is not None:
        yield (
            _PARTICIPATION,
            f"the trace names client {unknown}, and clients are 0 to {sections.num_clients - 1} "
            "(data.partition.num_clients); remove it from the trace",
        )
    elif sections.round_sizes == (0, 0):
        rounds = 0 if sections.federation is None else sections.federation.rounds
        yield (
            _PARTICIPATION,
            f"none of the {rounds} rounds has {settings.min_available} available clients "
            "(min_available); lower it, or use another trace",
        )


def _check_buffer(settings: BufferedParticipation, sections: Sections) -> Iterator[PathMessage]:
    federation, clients = sections.federation, sections.num_clients
    if federation is not None and federation.clients_per_round is not None:
        yield (
            ("federation", "clients_per_round"),
            "a buffered round has buffer_size clients; remove clients_per_round, and set "
            "participation.buffer_size",
        )
    if clients is None:
        return
    for key in ("concurrency", "buffer_size"):
        if getattr(settings, key) > clients:
            yield (
                (*_PARTICIPATION, key),
                f"must be at most {clients}, the number of clients, got {getattr(settings, key)}",
            )
    durations = settings.durations
    if isinstance(durations, DurationTable) and len(durations.values or ()) != clients:
        yield (
            (*_PARTICIPATION, "durations"),
            f"has {len(durations.values or ())} durations for {clients} clients "
            "(data.partition.num_clients); write one for each client",
        )


def _check_stale_updates(sections: Sections) -> Iterator[PathMessage]:
    """Yield what needs all clients of a round to start with it."""
    scheme, privacy = (*_PARTICIPATION, "scheme"), sections.privacy
    if sections.secure_aggregation is not None:
        yield (
            scheme,
            "the server scales each update of a buffer by its own staleness, and "
            "secure_aggregation shows it sums only; remove secure_aggregation, or use scheme: "
            "uniform",
        )
    if privacy is None:
        return
    if privacy.trust.name != "local":
        yield (
            scheme,
            f"the server scales each update of a buffer by its own staleness, and trust: "
            f"{privacy.trust.name} plans the noise of a sum without scales; use trust: local, or "
            "scheme: uniform",
        )
    elif privacy.release_kind.server_learns_bound and privacy.clipping.name == "adaptive":
        yield (
            ("privacy", "clipping"),
            "the bound is learnt from whole rounds, and clients of a buffer start in other rounds; "
            "use clipping: flat, or participation: {scheme: uniform}",
        )


def check_poisson_draws(
    federation: FederationSettings,
    privacy: PrivacySettings | None,
    secure: SecureAggregationSettings | None,
) -> Iterator[PathMessage]:
    """Yield (path, message) for every condition of Poisson draws that fails.

    Args:
        federation: the `federation` section.
        privacy: the `privacy` section; None if there is none.
        secure: the `secure_aggregation` section; None if there is none.
    """
    if federation.participation.scheme != "poisson":
        return
    scheme = ("federation", "participation", "scheme")
    if secure is not None:
        yield (
            scheme,
            "the parties of secure_aggregation see who takes part in a sum, and a draw may take "
            "fewer than min_clients; remove secure_aggregation, or use scheme: uniform",
        )
    if privacy is None:
        return
    if "drawn_clients" in unmet(privacy.choices(draws_clients=True)):
        yield (
            scheme,
            f"a secret draw of clients protects a client from whoever sees the models, and here "
            f"trust is {privacy.trust.name} and unit {privacy.unit}; use trust: central with unit: "
            "client, or scheme: uniform",
        )
    if federation.deadline is not None:
        yield (
            ("federation", "deadline"),
            "a reply that is late shows that its client was drawn, and the draw is secret; remove "
            "deadline, or use participation: {scheme: uniform}",
        )
    if federation.min_participants > 1:
        yield (
            ("federation", "min_participants"),
            "a run that ends when few updates came shows how many clients were drawn, and the draw "
            "is secret; remove min_participants, or use participation: {scheme: uniform}",
        )
    if privacy.on_exhausted != "refuse":
        yield (
            ("privacy", "on_exhausted"),
            f"{privacy.on_exhausted} needs clients that charge themselves, and a secret draw "
            "charges all of them for every round; use on_exhausted: refuse, or participation: "
            "{scheme: uniform}",
        )

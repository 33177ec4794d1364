"""Rules of clients: local training, privacy budgets, faults, and participation in rounds."""

from pathlib import Path

from fedsim.clients.client_settings import FaultSettings, is_client
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.conditions import unmet
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.limits import MAX_LEDGER_RECORDS
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import Mistakes
from fedsim.experiment.rules import (
    RoundSizes,
    Sections,
    check_file,
    messages_at,
    mistake,
    too_many_clients,
)
from fedsim.server.participation.settings import (
    BufferedParticipation,
    CyclicParticipation,
    DurationTable,
    SeparatedParticipation,
    TraceParticipation,
)
from fedsim.server.settings import FederationSettings

_UNIFORM = "use participation: {scheme: uniform}"


def check_participation(
    federation: FederationSettings, num_clients: int, round_sizes: RoundSizes, sections: Sections
) -> Mistakes:
    """Yield (key path, message) if a round has too many clients, or the ledger too many charges."""
    given = federation.clients_per_round
    yield from too_many_clients(("federation", "clients_per_round"), given, num_clients)
    rounds, charged = federation.rounds, round_sizes[1]
    if federation.participation.scheme == "poisson" and sections.privacy is not None:
        charged = num_clients  # also those that were not drawn
    records = rounds * charged
    if records > MAX_LEDGER_RECORDS:
        yield mistake(
            f"federation.rounds: {rounds:,} rounds of {charged:,} clients are {records:,} records "
            f"of the ledger, which holds at most {MAX_LEDGER_RECORDS:,}; lower rounds or "
            "clients_per_round"
        )


def check_weighting(federation: FederationSettings, privacy: PrivacySettings) -> Mistakes:
    """Yield (key path, message) if the weights of updates would reveal private client sizes."""
    weights, is_client = federation.weights, privacy.release_kind.protects_client
    if not weights.uses_sizes or not (is_client or privacy.adjacency.name == "add_remove"):
        return
    why, other = "adjacency add_remove keeps private", " or adjacency: zero_out"
    if is_client:
        why, other = "are part of what unit: client protects", ""
    own = ", size_power: 0" if weights.name == "examples_over_noise" else ""
    yield mistake(
        f"federation.weighting: '{weights.name}' would reveal client sizes, which {why}; use "
        f"weighting: uniform{own}{other}"
    )


def check_shares(federation: FederationSettings, round_sizes: RoundSizes) -> Mistakes:
    """Yield (key path, message) for shares that rounds with so few clients do not allow."""
    share, (clients, most) = federation.weights.max_share, round_sizes
    if share is not None and share * clients < 1:
        yield mistake(
            f"federation.weighting.max_share: must be at least 1/{clients}, the share of each of "
            f"the {clients} clients of a round under equal weights, got {value_text(share)}; raise "
            "it"
        )
    stragglers = federation.partial_work
    if stragglers is not None and stragglers.on_partial == "drop" and most < 1:
        yield mistake(
            f"federation.partial_work: share {stragglers.share:g} leaves out every client of a "
            "round; lower it, or use on_partial: keep"
        )


def check_sampling_rate(local: LocalSettings, privacy: PrivacySettings) -> Mistakes:
    """Yield (key path, message) if `privacy.sampling.rate` is given for batches of all examples."""
    if privacy.sampling.rate is not None and local.batch_size == "full":
        rate = value_text(privacy.sampling.rate)
        yield mistake(
            "privacy.sampling.rate: local.batch_size: full is a sampling rate of 1, and "
            f"privacy.sampling.rate is {rate}; remove the rate, or write a number for batch_size"
        )


def check_lr_schedule(local: LocalSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) if a learning-rate schedule is not supported or reaches 0."""
    privacy, federation = sections.privacy, sections.federation
    if local.lr_schedule is None:
        return
    if privacy is not None and privacy.trust.name != "local" and privacy.release_kind.draws_batches:
        yield mistake(
            f"local.lr_schedule: trust: {privacy.trust.name} plans the grid of all sums for one "
            "learning rate; remove lr_schedule, or use trust: local"
        )
    for number in () if federation is None else (1, federation.rounds):
        rate = local.learning_rate(number)
        if rate <= 0.0:
            yield mistake(
                f"local.lr_schedule: the learning rate of round {number} is {rate:g}, and that "
                "round would teach nothing at full cost; end the schedule later, or set a larger "
                "eta_min or gamma"
            )
            return


def check_budgets(privacy: PrivacySettings, num_clients: int) -> Mistakes:
    """Yield (key path, message) for each budget whose client number does not exist."""
    rule = _unknown_client(num_clients)
    for name, entry in privacy.clients.items():
        path: KeyPath = ("privacy", "clients", name)
        if is_client(name) and int(name) >= num_clients:
            yield path, rule
        for position, member in enumerate(entry.members or ()):
            if member >= num_clients:
                yield (*path, "members", position), rule


def check_budget_files(privacy: PrivacySettings, base: Path) -> Mistakes:
    """Yield (key path, message) for each file of privacy budgets that cannot be used."""
    for name, entry in privacy.clients.items():
        problem = None if entry.csv is None else check_file(entry.csv, base, ".csv")
        yield from messages_at(("privacy", "clients", name, "csv"), problem)


def check_faults(faults: list[FaultSettings], num_clients: int) -> Mistakes:
    """Yield (key path, message) for each injected fault whose client number does not exist."""
    for position, fault in enumerate(faults):
        for place, client in enumerate(fault.clients or ()):
            if client >= num_clients:
                yield ("faults", position, "clients", place), _unknown_client(num_clients)


def check_stragglers(faults: list[FaultSettings], federation: FederationSettings) -> Mistakes:
    """Yield (key path, message) for each straggler fault if the federation has no deadline."""
    for position, fault in enumerate(faults):
        if fault.kind == "straggler" and federation.deadline is None:
            rule = "a straggler needs a deadline to miss; set federation.deadline, in seconds"
            yield ("faults", position), rule


def _unknown_client(clients: int) -> str:
    return (
        f"no such client; use a number from 0 to {clients - 1} "
        f"(data.partition.num_clients is {clients})"
    )


def check_clients_of_scheme(
    federation: FederationSettings, num_clients: int, round_sizes: RoundSizes
) -> Mistakes:
    """Yield (key path, message) if a participation scheme does not fit the number of clients."""
    settings = federation.participation
    for key in ("groups", "concurrency", "buffer_size"):
        number = getattr(settings, key, None)
        if number is not None and number > num_clients:
            yield mistake(
                f"federation.participation.{key}: must be at most {num_clients}, the number of "
                f"clients, got {number}"
            )
    if isinstance(settings, CyclicParticipation) and settings.members is not None:
        yield from _check_members(settings, num_clients)
    elif isinstance(settings, SeparatedParticipation):
        yield from _check_turns(settings, num_clients, round_sizes[1])
    elif isinstance(settings, TraceParticipation) and settings.availability is not None:
        yield from _check_trace(settings, federation.rounds, num_clients, round_sizes)
    elif isinstance(settings, BufferedParticipation):
        durations = settings.durations
        if isinstance(durations, DurationTable) and len(durations.values or ()) != num_clients:
            yield mistake(
                f"federation.participation.durations: has {len(durations.values or ())} durations "
                f"for {num_clients} clients (data.partition.num_clients); write one for each client"
            )


def check_partial_work(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that `federation.partial_work` does not allow."""
    privacy, local, settings = sections.privacy, sections.local, federation.partial_work
    if settings is None:
        return
    if federation.participation.scheme == "poisson" and privacy is not None:
        yield mistake(
            "federation.partial_work: names stragglers among the clients of a round, and private "
            f"Poisson draws are secret; remove partial_work, or {_UNIFORM}"
        )
    if settings.on_partial == "drop":
        return
    if local is not None and local.steps == 1:
        yield mistake(
            "federation.partial_work: a round of one step has no part; set local.steps to 2 or "
            "more, or use on_partial: drop"
        )
    if (
        privacy is not None
        and privacy.noise == "secure"
        and SAMPLING_SCHEMES[privacy.sampling.name].divides_rounds
    ):
        yield mistake(
            "federation.partial_work: secure noise divides the examples anew in rounds of equal "
            "length, and stragglers have shorter ones; use sampling: poisson, or on_partial: drop"
        )


def _check_members(settings: CyclicParticipation, clients: int) -> Mistakes:
    from fedsim.server.participation.participation import groups_of

    members = {client for group in groups_of(settings, clients) for client in group}
    known = set(range(clients))
    if members - known:
        yield mistake(
            f"federation.participation.members: name client {min(members - known)}, and clients "
            f"are 0 to {clients - 1} (data.partition.num_clients); remove it"
        )
    elif known - members:
        yield mistake(
            f"federation.participation.members: client {min(known - members)} is in no group; add "
            "it to one"
        )


def _check_turns(settings: SeparatedParticipation, clients: int, per_round: int) -> Mistakes:
    most = max(1, clients // max(1, per_round))
    if settings.rounds_apart is not None and settings.rounds_apart > most:
        yield mistake(
            f"federation.participation.rounds_apart: must be at most {most}, as {clients} clients "
            f"take turns and each round has {per_round}, got {settings.rounds_apart}; lower it, or "
            "federation.clients_per_round"
        )


def _check_trace(
    settings: TraceParticipation, rounds: int, clients: int, round_sizes: RoundSizes
) -> Mistakes:
    from fedsim.server.participation.schedules import TraceSchedule

    named = TraceSchedule(0, clients, clients, settings.availability or "").clients
    unknown = min((client for client in named if client >= clients), default=None)
    if unknown is not None:
        yield mistake(
            f"federation.participation: the trace names client {unknown}, and clients are 0 to "
            f"{clients - 1} (data.partition.num_clients); remove it from the trace"
        )
    elif round_sizes == (0, 0):
        yield mistake(
            f"federation.participation: none of the {rounds} rounds has {settings.min_available} "
            "available clients (min_available); lower it, or use another trace"
        )


def check_buffered_rounds(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that buffered rounds (FedBuff) do not allow."""
    privacy = sections.privacy
    if federation.participation.scheme != "buffered":
        return
    if federation.clients_per_round is not None:
        yield mistake(
            "federation.clients_per_round: a buffered round has buffer_size clients; remove "
            "clients_per_round, and set participation.buffer_size"
        )
    if sections.secure_aggregation is not None:
        yield mistake(
            "federation.participation.scheme: the server scales each update of a buffer by its own "
            "staleness, and secure_aggregation shows it sums only; remove secure_aggregation, or "
            "use scheme: uniform"
        )
    if privacy is None:
        return
    if privacy.trust.name != "local":
        yield mistake(
            "federation.participation.scheme: the server scales each update of a buffer by its own "
            f"staleness, and trust: {privacy.trust.name} plans the noise of a sum without scales; "
            "use trust: local, or scheme: uniform"
        )
    elif privacy.release_kind.server_learns_bound and privacy.clipping.name == "adaptive":
        yield mistake(
            "privacy.clipping: the bound is learnt from whole rounds, and clients of a buffer "
            "start in other rounds; use clipping: flat, or participation: {scheme: uniform}"
        )


def check_poisson_draws(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that do not allow Poisson sampling of clients."""
    privacy = sections.privacy
    if federation.participation.scheme != "poisson":
        return
    if sections.secure_aggregation is not None:
        yield mistake(
            "federation.participation.scheme: the parties of secure_aggregation see who takes part "
            "in a sum, and a draw may take fewer than min_clients; remove secure_aggregation, or "
            "use scheme: uniform"
        )
    if privacy is None:
        return
    if "drawn_clients" in unmet(privacy.choices(draws_clients=True)):
        yield mistake(
            "federation.participation.scheme: a secret draw of clients protects a client from "
            f"whoever sees the models, and here trust is {privacy.trust.name} and unit "
            f"{privacy.unit}; use trust: central with unit: client, or scheme: uniform"
        )
    if federation.deadline is not None:
        yield mistake(
            "federation.deadline: a reply that is late shows that its client was drawn, and the "
            f"draw is secret; remove deadline, or {_UNIFORM}"
        )
    if federation.min_participants > 1:
        yield mistake(
            "federation.min_participants: a run that ends when few updates came shows how many "
            f"clients were drawn, and the draw is secret; remove min_participants, or {_UNIFORM}"
        )
    if privacy.on_exhausted != "refuse":
        yield mistake(
            f"privacy.on_exhausted: {privacy.on_exhausted} needs clients that charge themselves, "
            "and a secret draw charges all of them for every round; use on_exhausted: refuse, or "
            "participation: {scheme: uniform}"
        )

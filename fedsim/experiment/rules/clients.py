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
from fedsim.experiment.rules import RoundSizes, Sections, check_file, mistake, too_many_clients
from fedsim.server.participation.settings import (
    BufferedParticipation,
    CyclicParticipation,
    DurationTable,
    SeparatedParticipation,
    TraceParticipation,
)
from fedsim.server.settings import FederationSettings

_SCHEME = "participation: {scheme: uniform}"


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
        size = f"{rounds:,} rounds of {charged:,} clients are {records:,} records of the ledger"
        most = f"which holds at most {MAX_LEDGER_RECORDS:,}; lower rounds or clients_per_round"
        yield mistake(f"federation.rounds: {size}, {most}")


def check_weighting(federation: FederationSettings, privacy: PrivacySettings) -> Mistakes:
    """Yield (key path, message) if the weights of updates would reveal private client sizes."""
    weights, is_client = federation.weights, privacy.release_kind.protects_client
    if not weights.uses_sizes or not (is_client or privacy.adjacency.name == "add_remove"):
        return
    why, other = "adjacency add_remove keeps private", " or adjacency: zero_out"
    if is_client:
        why, other = "are part of what unit: client protects", ""
    own = ", size_power: 0" if weights.name == "examples_over_noise" else ""
    what = f"'{weights.name}' would reveal client sizes"
    yield mistake(f"federation.weighting: {what}, which {why}; use weighting: uniform{own}{other}")


def check_shares(federation: FederationSettings, round_sizes: RoundSizes) -> Mistakes:
    """Yield (key path, message) for shares that rounds with so few clients do not allow."""
    share, (clients, most) = federation.weights.max_share, round_sizes
    if share is not None and share * clients < 1:
        equal = f"the share of each of the {clients} clients of a round under equal weights"
        rule = f"must be at least 1/{clients}, {equal}, got {value_text(share)}; raise it"
        yield mistake(f"federation.weighting.max_share: {rule}")
    stragglers = federation.partial_work
    if stragglers is not None and stragglers.on_partial == "drop" and most < 1:
        why = f"share {stragglers.share:g} leaves out every client of a round"
        yield mistake(f"federation.partial_work: {why}; lower it, or use on_partial: keep")


def check_sampling_rate(local: LocalSettings, privacy: PrivacySettings) -> Mistakes:
    """Yield (key path, message) if `privacy.sampling.rate` is given for batches of all examples."""
    if privacy.sampling.rate is not None and local.batch_size == "full":
        given = value_text(privacy.sampling.rate)
        why = f"local.batch_size: full is a sampling rate of 1, got {given}"
        fix = "remove the rate, or write a number for batch_size"
        yield mistake(f"privacy.sampling.rate: {why}; {fix}")


def check_lr_schedule(local: LocalSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) if a learning-rate schedule is not supported or reaches 0."""
    privacy, federation = sections.privacy, sections.federation
    if local.lr_schedule is None:
        return
    if privacy is not None and privacy.trust.name != "local" and privacy.release_kind.draws_batches:
        why = f"trust: {privacy.trust.name} plans the grid of all sums for one learning rate"
        yield mistake(f"local.lr_schedule: {why}; remove lr_schedule, or use trust: local")
    for number in () if federation is None else (1, federation.rounds):
        rate = local.learning_rate(number)
        if rate <= 0.0:
            why = f"the learning rate of round {number} is {rate:g}"
            cost = "that round would teach nothing at full cost"
            fix = "end the schedule later, or set a larger eta_min or gamma"
            yield mistake(f"local.lr_schedule: {why}, and {cost}; {fix}")
            return


def check_budgets(privacy: PrivacySettings, num_clients: int) -> Mistakes:
    """Yield (key path, message) for each budget whose client number does not exist."""
    for name, entry in privacy.clients.items():
        path: KeyPath = ("privacy", "clients", name)
        if is_client(name):
            yield from _unknown_client(path, int(name), num_clients)
        for position, member in enumerate(entry.members or ()):
            yield from _unknown_client((*path, "members", position), member, num_clients)


def check_budget_files(privacy: PrivacySettings, base: Path) -> Mistakes:
    """Yield (key path, message) for each file of privacy budgets that cannot be used."""
    for name, entry in privacy.clients.items():
        if entry.csv is not None and (problem := check_file(entry.csv, base, ".csv")):
            yield ("privacy", "clients", name, "csv"), problem


def check_faults(faults: list[FaultSettings], num_clients: int) -> Mistakes:
    """Yield (key path, message) for each injected fault whose client number does not exist."""
    for position, fault in enumerate(faults):
        for place, client in enumerate(fault.clients or ()):
            yield from _unknown_client(("faults", position, "clients", place), client, num_clients)


def check_stragglers(faults: list[FaultSettings], federation: FederationSettings) -> Mistakes:
    """Yield (key path, message) for each straggler fault if the federation has no deadline."""
    for position, fault in enumerate(faults):
        if fault.kind == "straggler" and federation.deadline is None:
            rule = "a straggler needs a deadline to miss; set federation.deadline, in seconds"
            yield ("faults", position), rule


def _unknown_client(path: KeyPath, client: int, clients: int) -> Mistakes:
    if client >= clients:
        fix = f"use a number from 0 to {clients - 1} (data.partition.num_clients is {clients})"
        yield path, f"no such client; {fix}"


def check_clients_of_scheme(
    federation: FederationSettings, num_clients: int, round_sizes: RoundSizes
) -> Mistakes:
    """Yield (key path, message) if a participation scheme does not fit the number of clients."""
    settings = federation.participation
    for key in ("groups", "concurrency", "buffer_size"):
        number = getattr(settings, key, None)
        if number is not None and number > num_clients:
            rule = f"must be at most {num_clients}, the number of clients, got {number}"
            yield mistake(f"federation.participation.{key}: {rule}")
    if isinstance(settings, CyclicParticipation) and settings.members is not None:
        yield from _check_members(settings, num_clients)
    elif isinstance(settings, SeparatedParticipation):
        per_round = round_sizes[1]
        most = max(1, num_clients // max(1, per_round))
        if settings.rounds_apart is not None and settings.rounds_apart > most:
            why = f"as {num_clients} clients take turns and each round has {per_round}"
            rule = f"must be at most {most}, {why}, got {settings.rounds_apart}"
            fix = "lower it, or federation.clients_per_round"
            yield mistake(f"federation.participation.rounds_apart: {rule}; {fix}")
    elif isinstance(settings, TraceParticipation) and settings.availability is not None:
        yield from _check_trace(settings, federation.rounds, num_clients, round_sizes)
    elif isinstance(settings, BufferedParticipation):
        durations = settings.durations
        if isinstance(durations, DurationTable) and len(durations.values or ()) != num_clients:
            known = f"{num_clients} clients (data.partition.num_clients)"
            given = f"has {len(durations.values or ())} durations for {known}"
            yield mistake(f"federation.participation.durations: {given}; write one for each client")


def check_partial_work(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that `federation.partial_work` does not allow."""
    privacy, local, settings = sections.privacy, sections.local, federation.partial_work
    if settings is None or settings.on_partial == "drop":
        return
    if local is not None and local.steps == 1:
        fix = "set local.steps to 2 or more, or use on_partial: drop"
        yield mistake(f"federation.partial_work: a round of one step has no part; {fix}")
    if privacy is None or privacy.noise != "secure":
        return
    if SAMPLING_SCHEMES[privacy.sampling.name].divides_rounds:
        why = "secure noise divides the examples anew in rounds of equal length"
        fix = "use sampling: poisson, or on_partial: drop"
        yield mistake(f"federation.partial_work: {why}, and stragglers have shorter ones; {fix}")


def _check_members(settings: CyclicParticipation, clients: int) -> Mistakes:
    from fedsim.server.participation.participation import groups_of

    members = {client for group in groups_of(settings, clients) for client in group}
    known = set(range(clients))
    if members - known:
        rule = f"clients are 0 to {clients - 1} (data.partition.num_clients)"
        given = f"name client {min(members - known)}"
        yield mistake(f"federation.participation.members: {given}, and {rule}; remove it")
    elif known - members:
        why = f"client {min(known - members)} is in no group; add it to one"
        yield mistake(f"federation.participation.members: {why}")


def _check_trace(
    settings: TraceParticipation, rounds: int, clients: int, round_sizes: RoundSizes
) -> Mistakes:
    from fedsim.server.participation.schedules import TraceSchedule

    named = TraceSchedule(0, clients, clients, settings.availability or "").clients
    unknown = min((client for client in named if client >= clients), default=None)
    if unknown is not None:
        rule = f"clients are 0 to {clients - 1} (data.partition.num_clients)"
        given = f"the trace names client {unknown}"
        yield mistake(f"federation.participation: {given}, and {rule}; remove it from the trace")
    elif round_sizes == (0, 0):
        needed = f"{settings.min_available} available clients (min_available)"
        why = f"none of the {rounds} rounds has {needed}"
        yield mistake(f"federation.participation: {why}; lower it, or use another trace")


def check_buffered_rounds(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that buffered rounds (FedBuff) do not allow."""
    privacy = sections.privacy
    if federation.participation.scheme != "buffered":
        return
    if federation.clients_per_round is not None:
        why = "a buffered round has buffer_size clients"
        fix = "remove clients_per_round, and set participation.buffer_size"
        yield mistake(f"federation.clients_per_round: {why}; {fix}")
    scales = "the server scales each update of a buffer by its own staleness"
    if sections.secure_aggregation is not None:
        why = f"{scales}, and secure_aggregation shows it sums only"
        fix = "remove secure_aggregation, or use scheme: uniform"
        yield mistake(f"federation.participation.scheme: {why}; {fix}")
    if privacy is None:
        return
    if privacy.trust.name != "local":
        why = f"{scales}, and trust: {privacy.trust.name} plans the noise of a sum without scales"
        fix = "use trust: local, or scheme: uniform"
        yield mistake(f"federation.participation.scheme: {why}; {fix}")
    elif privacy.release_kind.server_learns_bound and privacy.clipping.name == "adaptive":
        why = "the bound is learnt from whole rounds, and clients of a buffer start in other rounds"
        yield mistake(f"privacy.clipping: {why}; use clipping: flat, or {_SCHEME}")


def check_poisson_draws(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that do not allow Poisson sampling of clients."""
    privacy = sections.privacy
    if federation.participation.scheme != "poisson":
        return
    if sections.secure_aggregation is not None:
        why = "the parties of secure_aggregation see who takes part in a sum"
        few = "a draw may take fewer than min_clients"
        fix = "remove secure_aggregation, or use scheme: uniform"
        yield mistake(f"federation.participation.scheme: {why}, and {few}; {fix}")
    if privacy is None:
        return
    if "drawn_clients" in unmet(privacy.choices(draws_clients=True)):
        why = "a secret draw of clients protects a client from whoever sees the models"
        given = f"here trust is {privacy.trust.name} and unit {privacy.unit}"
        fix = "use trust: central with unit: client, or scheme: uniform"
        yield mistake(f"federation.participation.scheme: {why}, and {given}; {fix}")
    ends = "a run that ends when few updates came shows how many clients were drawn"
    telling = {
        "deadline": (federation.deadline, "a reply that is late shows that its client was drawn"),
        "min_participants": (federation.min_participants > 1, ends),
        "partial_work": (federation.partial_work, "names stragglers among the clients of a round"),
    }
    for key, (is_set, why) in telling.items():
        if is_set:
            fix = f"remove {key}, or use {_SCHEME}"
            yield ("federation", key), f"{why}, and private Poisson draws are secret; {fix}"
    if privacy.on_exhausted != "refuse":
        why = f"{privacy.on_exhausted} needs clients that charge themselves"
        draw = "a secret draw charges all of them for every round"
        fix = f"use on_exhausted: refuse, or {_SCHEME}"
        yield mistake(f"privacy.on_exhausted: {why}, and {draw}; {fix}")

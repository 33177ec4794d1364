"""Privacy totals of clients over several sources: clients are matched, their ledgers composed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import prod
from typing import Any, TypeVar

from fedsim.accountant import (
    Event,
    Gaussian,
    PoissonSampled,
    PrivacyLedger,
    UnsupportedEventError,
    make_accountant,
)
from fedsim.accountant.accountants import AccountantChoice, accountant_name
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.accountant.trust import Observer
from fedsim.clients.mechanisms.kinds import protects_client
from fedsim.core.text_formats import finite_or_none, json_value
from fedsim.tools.totals.sources import EVERYONE, Source, SourceError, renamed, repeats

T = TypeVar("T")
_MOST_CHOICES = 1000  # combinations of clients


@dataclass(frozen=True)
class ClientTotal:
    """The total privacy spend of one client over all sources."""

    client: str  # its number, or the user's name for it; "" if files name no clients
    name: str | None  # in the data
    sources: tuple[str, ...]  # which charged the client
    delta: float
    epsilon: float  # by the first accountant, as is the one against the server
    epsilons: Mapping[str, float]  # by the accountant's name
    epsilon_against_server: float | None
    ledger: PrivacyLedger

    def to_json(self) -> dict[str, Any]:
        """Return the total as JSON values, which `read_source` can read; an infinite ε is null."""
        return json_value({**vars(self), "ledger": self.ledger.to_list()})


@dataclass(frozen=True)
class Totals:
    """The privacy totals of all clients over several runs and ledgers."""

    sources: tuple[str, ...]  # without those that repeat another source
    repeated: tuple[str, ...]  # bit for bit, so that they cost nothing
    unfinished: tuple[str, ...]  # runs, counted up to their last record
    unit: str | None  # None if no source names one
    adjacency: Adjacency
    observer: Observer | None  # against whom every ε holds; None without a run of fedsim
    clients: tuple[ClientTotal, ...]  # in the order of their numbers
    is_of_any_client: bool = False  # totals are of combinations of clients (`account_of`)

    @property
    def largest(self) -> ClientTotal:
        """The total of the client whose ε is the largest."""
        return max(self.clients, key=lambda total: total.epsilon)

    def to_json(self) -> dict[str, Any]:
        """Return the totals as JSON values."""
        return {
            "schema": 1,
            "sources": list(self.sources),
            "repeated": list(self.repeated),
            "unfinished": list(self.unfinished),
            "unit": self.unit,
            "adjacency": self.adjacency,
            "against": self.observer,
            "system_epsilon": finite_or_none(self.largest.epsilon),
            "clients": [total.to_json() for total in self.clients],
        }


def account_of(
    sources: Sequence[Source],
    *,
    delta: float | None = None,
    accountants: Sequence[AccountantChoice] = (),
    adjacency: Adjacency | None = None,
    clients: Mapping[str, Sequence[str]] | None = None,
    independent_noise: bool = False,
) -> Totals:
    """Return the totals of every client over all sources, or raise a SourceError with the fix.

    Clients of several runs are matched by their names if all have names. Otherwise they are matched
    by their numbers, if equal numbers have the same examples in every run. Otherwise (partitions
    drawn with different seeds) an example may belong to any client of each run. The totals are then
    those of all combinations of one client of each run, and the largest total is the guarantee.
    `clients` has, for each client name, the texts `SOURCE:CLIENT` that say where this client is
    (`SOURCE` for a file that names no client). With `independent_noise`, seeded noise of runs with
    one seed counts as independent, as it would be in the deployments that these runs simulate.

    Guarantee: all releases of all sources about client k are jointly (ε_k, δ)-DP under `adjacency`,
    against the adversary `observer` for runs of fedsim. Conditions: client k has the same data in
    all sources, and the events of files describe what was released. A later run may depend on
    results of earlier ones, but its noise, sampling rates and number of steps must be fixed without
    looking at them (`PrivacyFilter` covers more). For runs of fedsim, ε includes what the noise
    sampler adds; noise of other tools is taken to be what their events say.
    """
    given = [source.name for source in sources]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise SourceError(f"{twice} is given twice")
    if clients is not None:
        sources = _mapped(sources, clients)
    # Of an interrupted run and a longer one that repeats all of its releases, the longer is kept.
    kept = _uncovered(sources, lambda source, other: repeats(other, source))
    repeated = [source.name for source in sources if not any(source is counted for counted in kept)]
    unit, chosen, observer, names = _terms(kept, adjacency, accountants)
    if not independent_noise:
        _refuse_common_noise(kept)
    _refuse_mixture(kept)
    kept, is_known = _matched(kept) if clients is None else (kept, True)
    keys = sorted({key for source in kept for key in source.clients}, key=_by_number)
    return Totals(
        tuple(source.name for source in kept),
        tuple(repeated),
        tuple(source.name for source in kept if not source.is_finished),
        unit,
        chosen,
        observer,
        tuple(_total(key, kept, delta, names, chosen) for key in keys),
        not is_known,
    )


def _total(
    key: str,
    sources: Sequence[Source],
    delta: float | None,
    accountants: Sequence[AccountantChoice],
    adjacency: Adjacency,
) -> ClientTotal:
    counted = [source for source in sources if key in source.clients]
    records = [source.clients[key] for source in counted]
    chosen = _delta(key, counted) if delta is None else delta
    total, server = PrivacyLedger(), PrivacyLedger()
    for record in records:
        total.merge(record.ledger)
        server.merge(record.against_server or PrivacyLedger())

    def epsilon(ledger: PrivacyLedger, accountant: AccountantChoice) -> float:
        """Return ε of a ledger, with the noise sampler's slack once for each fedsim run.

        The slack of a run covers the values that the run may draw. Replacing the noise of one run
        after another by what was drawn adds it each time.
        """
        try:
            account = ledger.compose_into(make_accountant(accountant, adjacency=adjacency))
        except UnsupportedEventError as error:
            raise SourceError(
                f"{_whose(key)}: {error}; under {adjacency} adjacency there is no ε. Pass the "
                "--adjacency that the events hold under"
            ) from error
        get_epsilon: Callable[[float], float] = account.get_epsilon
        for _ in range(sum(source.is_run for source in counted)):
            get_epsilon = partial(epsilon_with_slack, get_epsilon)
        return get_epsilon(chosen)

    epsilons = {accountant_name(name): epsilon(total, name) for name in accountants}
    has_server = all(record.against_server is not None for record in records)
    return ClientTotal(
        key,
        next((record.name for record in records if record.name is not None), None),
        tuple(source.name for source in counted),
        chosen,
        next(iter(epsilons.values())),
        epsilons,
        epsilon(server, accountants[0]) if has_server else None,
        total,
    )


def _whose(key: str) -> str:
    return f"client {key}" if key else "the ledger"


def _delta(key: str, sources: Sequence[Source]) -> float:
    deltas = [source.clients[key].delta for source in sources if source.unit is not None]
    known = {delta for delta in deltas if delta is not None}
    if len(known) != 1 or None in deltas:
        given = "no δ" if not known else "several δ: " + ", ".join(f"{d:g}" for d in sorted(known))
        raise SourceError(f"{_whose(key)} has {given}; pass the δ of the total with --delta")
    return known.pop()


def _terms(
    sources: Sequence[Source], adjacency: Adjacency | None, accountants: Sequence[AccountantChoice]
) -> tuple[str | None, Adjacency, Observer | None, Sequence[AccountantChoice]]:
    """Return (unit, adjacency, observer, accountants) that all runs and training files share."""
    known = sorted((s for s in sources if s.unit is not None), key=lambda s: not s.is_run)
    if not known:
        return None, adjacency or "zero_out", None, accountants or ("pld",)
    first = known[0]
    for source in known[1:]:
        for key in ("unit", "adjacency", *["observer"] * source.is_run):
            value, other = getattr(first, key), getattr(source, key)
            if value != other:
                raise SourceError(
                    f"{first.name} has {key} {value!r} and {source.name} {other!r}: an ε of both "
                    f"together has no meaning; account for the runs of each {key} apart"
                )
    if adjacency not in (None, first.adjacency):
        rule = f"{first.name} holds under {first.adjacency} adjacency only"
        raise SourceError(f"--adjacency {adjacency}: {rule}")
    used: set[AccountantChoice] = {s.accountant for s in known if s.accountant is not None}
    usual = tuple(used) if len(used) == 1 else ("pld",)
    return first.unit, first.adjacency or "zero_out", first.observer, accountants or usual


def _refuse_common_noise(sources: Sequence[Source]) -> None:
    """Refuse runs with seeded noise of one seed: noise that clients of both have can cancel."""
    seeded = [source for source in sources if source.seed is not None]
    for run, other in combinations(seeded, 2):
        if run.seed == other.seed:
            raise SourceError(
                f"{run.name} and {other.name} have seed {run.seed} and seeded noise, so the "
                "noise of one is that of the other, and together they have no ε. Give each run a "
                "seed of its own, or use privacy.noise: secure; --independent-noise accounts for "
                "what the two simulate, with noise of their own"
            )


def _refuse_mixture(sources: Sequence[Source]) -> None:
    unnamed = [source.name for source in sources if EVERYONE in source.clients]
    named = [source.name for source in sources if set(source.clients) - {EVERYONE}]
    if unnamed and named:
        raise SourceError(
            f"{unnamed[0]} names no client, and {named[0]} does: say whose it is with --clients "
            "FILE, a map from each client to its places"
        )


def _mapped(sources: Sequence[Source], clients: Mapping[str, Sequence[str]]) -> list[Source]:
    """Return the sources with client keys from a map, which must contain every client once."""
    places: dict[str, str] = {}
    for client, given in clients.items():
        for place in given:
            if place in places:
                raise SourceError(f"--clients: {place} is in {places[place]} and in {client}")
            places[place] = client
    mapped = list[Source]()
    for source in sources:
        place_of = {k: f"{source.name}:{k}" if k else source.name for k in source.clients}
        lost = next((place for place in place_of.values() if place not in places), None)
        if lost is not None:
            reason = "so its spend would be in no total"
            raise SourceError(f"--clients: {lost} is in no entry, {reason}")
        keys = {places.pop(place): key for key, place in place_of.items()}
        if len(keys) < len(place_of):
            raise SourceError(f"--clients: an entry has two clients of {source.name}")
        mapped.append(renamed(source, keys))
    if places:
        raise SourceError(f"--clients: {next(iter(places))} is no client of any source")
    return mapped


def _by_number(key: str) -> tuple[float, str]:
    return (float(key), "") if key.isdecimal() else (math.inf, key)


def _matched(sources: Sequence[Source]) -> tuple[list[Source], bool]:
    """Return the sources such that equal client keys mean the same client, and whether they do."""
    runs = [source for source in sources if source.is_run]
    if len(runs) < 2:
        return list(sources), True
    names = [[record.name for record in run.clients.values()] for run in runs]
    if all(None not in own and len(set(own)) == len(own) for own in names):
        return [
            renamed(s, {c.name or "": key for key, c in s.clients.items()}) if s.is_run else s
            for s in sources
        ], True
    if len({run.assignment for run in runs}) == 1:
        return list(sources), True
    return _every_choice(sources), False


def _every_choice(sources: Sequence[Source]) -> list[Source]:
    """Return the sources with keys for combinations of clients, one of each source.

    Combinations are left out in which a client spends no more than another of its source.
    """
    way_out = (
        "use one seed and secure noise, a partition by a column or files, or --clients FILE where "
        "you know which clients are the same"
    )
    if any(protects_client(source.unit or "") for source in sources):
        raise SourceError(
            f"{sources[0].name} and {sources[1].name} divide the data among clients by another "
            f"draw, so no client of one is a client of the other, and none has a total; {way_out}"
        )
    kept = [_uncovered(source.clients, partial(_spends_more, source)) for source in sources]
    if prod(len(keys) for keys in kept) > _MOST_CHOICES:
        raise SourceError(
            "the partitions are drawn with several seeds, so an example may be in any client of "
            f"each run, and the clients of {sources[0].name} spent {len(kept[0])} different "
            f"amounts: too many combinations to add up; {way_out}"
        )
    choices = list(product(*kept))
    keys = [f"any ({number})" for number in range(1, len(choices) + 1)]
    keys = keys if len(choices) > 1 else ["any"]
    chosen = zip(sources, zip(*choices, strict=True), strict=True)
    return [renamed(source, dict(zip(keys, old, strict=True))) for source, old in chosen]


def _uncovered(items: Iterable[T], covers: Callable[[T, T], bool]) -> list[T]:
    """Return items of which one covers each other item; of equal ones, the first."""
    kept: list[T] = []
    for item in items:
        if not any(covers(other, item) for other in kept):
            kept = [other for other in kept if not covers(item, other)] + [item]
    return kept


def _spends_more(source: Source, client: str, less: str) -> bool:
    """Return whether a client spent at least as much as another one, at every δ."""
    record, other = source.clients[client], source.clients[less]
    server, others = record.against_server, other.against_server
    return (
        record.delta == other.delta
        and _dominates(record.ledger, other.ledger)
        and (server is None or others is None or _dominates(server, others))
    )


def _dominates(ledger: PrivacyLedger, other: PrivacyLedger) -> bool:
    """Return whether a ledger has the other's events, with no smaller rate and no more noise.

    A Poisson-sampled Gaussian loses more with a larger rate, with less noise and with more steps.
    """
    if not other.entries or ledger.entries == other.entries:
        return True
    return len(ledger) == len(other) and all(
        count >= less and _is_larger(event, smaller)
        for (event, count), (smaller, less) in zip(ledger.entries, other.entries, strict=True)
    )


def _is_larger(event: Event, other: Event) -> bool:
    if isinstance(event, Gaussian) and isinstance(other, Gaussian):
        return event.noise_multiplier <= other.noise_multiplier
    if isinstance(event, PoissonSampled) and isinstance(other, PoissonSampled):
        return event.sampling_rate >= other.sampling_rate and _is_larger(event.event, other.event)
    return event == other

"""Totals of clients over several sources: their ledgers, composed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from fedsim.accountant import PrivacyLedger, UnsupportedEventError, make_accountant
from fedsim.accountant.accountants import AccountantChoice, accountant_name
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.accountant.trust import Observer
from fedsim.tools.totals.assignment import aligned, every_choice, same_clients
from fedsim.tools.totals.sources import (
    EVERYONE,
    Source,
    SourceError,
    renamed,
    repeats,
    without_repetitions,
)


@dataclass(frozen=True)
class ClientTotal:
    """Everything that one client spent in the sources.

    Attributes:
        client: its number, or its name in a map of clients; "" where the files name no client.
        name: its name in the data, where it has one.
        sources: the sources that it spent in.
        ledger: all of its charges.
        delta: δ of every ε.
        epsilons: by accountant.
        epsilon_against_server: in distributed trust, by the first accountant; None elsewhere.
    """

    client: str
    name: str | None
    sources: tuple[str, ...]
    ledger: PrivacyLedger
    delta: float
    epsilons: Mapping[str, float]
    epsilon_against_server: float | None = None

    @property
    def epsilon(self) -> float:
        """ε by the first accountant."""
        return next(iter(self.epsilons.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the total as JSON values, which `read_source` reads again; null is infinite."""
        return {
            "client": self.client,
            "name": self.name,
            "sources": list(self.sources),
            "delta": self.delta,
            "epsilon": _finite(self.epsilon),
            "epsilons": {name: _finite(value) for name, value in self.epsilons.items()},
            "epsilon_against_server": _finite(self.epsilon_against_server),
            "ledger": self.ledger.to_list(),
        }


@dataclass(frozen=True)
class Totals:
    """Totals of all clients.

    Attributes:
        sources: names of the sources, without those that repeat another one.
        repeated: names of sources that repeat another one bit for bit, so that they cost nothing.
        unfinished: names of runs that have not ended; they are counted up to their last record.
        unit: what one ε protects; None without a run of fedsim.
        adjacency: which data sets are neighbours.
        observer: whom every ε is against; None without a run of fedsim.
        clients: in the order of their numbers.
        is_of_any_client: whether each total is of one client of each run, whichever: the partitions
            are drawn by their seeds, and an example may be in any client.
    """

    sources: tuple[str, ...]
    repeated: tuple[str, ...]
    unfinished: tuple[str, ...]
    unit: str | None
    adjacency: Adjacency
    observer: Observer | None
    clients: tuple[ClientTotal, ...]
    is_of_any_client: bool = False

    @property
    def largest(self) -> ClientTotal:
        """The client with the largest ε."""
        return max(self.clients, key=lambda total: total.epsilon)

    def to_json(self) -> dict[str, Any]:
        """Return the account as JSON values."""
        return {
            "schema": 1,
            "sources": list(self.sources),
            "repeated": list(self.repeated),
            "unfinished": list(self.unfinished),
            "unit": self.unit,
            "adjacency": self.adjacency,
            "against": self.observer,
            "system_epsilon": _finite(self.largest.epsilon),
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
    """Return the totals of every client over all sources.

    Clients of several runs are the same by their names where all have one, else by their numbers
    where every run has the same examples under them. Where a partition is drawn with several seeds,
    an example may be in any client of each run: the totals are those of every choice of a client of
    each run, and the largest one is the guarantee.

    Guarantee: if client k of all sources has the same data, and the events of files describe what
    was released, then all releases of all sources about client k are jointly (ε_k, δ)-DP under
    `adjacency`, against `observer` where runs of fedsim say so. A later run may depend on results
    of earlier ones, but its noise, sampling rates and number of steps must be fixed without looking
    at them (`PrivacyFilter` covers more). The slack of the sampler is in ε of every run of fedsim;
    noise of other tools is taken to be what their events say.

    Args:
        sources: runs and files.
        delta: δ of every ε; None: that of the runs.
        accountants: names; by default that of the runs, or "pld".
        adjacency: of the files; None: that of the runs, or "zero_out".
        clients: for each name the places `SOURCE:CLIENT` of the same client (or `SOURCE` for a file
            that names no client); None: clients of one number are the same.
        independent_noise: whether to take seeded noise of runs with one seed as independent, as
            their simulations do.

    Raises:
        SourceError: the sources cannot be added up; the message says why and how to go on.
    """
    _refuse_same_name(sources)
    if clients is not None:
        sources = _mapped(sources, clients)
    kept = without_repetitions(sources)
    repeated = [source.name for source in sources if not any(source is one for one in kept)]
    unit, chosen, observer, names = _terms(kept, adjacency, accountants)
    if not independent_noise:
        _refuse_common_noise(kept)
    _refuse_mixture(kept)
    known = clients is not None or same_clients(kept)
    if clients is None:
        kept = aligned(kept) if known else every_choice(kept)
    keys = sorted({key for source in kept for key in source.ledgers}, key=_by_number)
    found = tuple(_total(key, kept, delta, names, chosen) for key in keys)
    return Totals(
        tuple(source.name for source in kept),
        tuple(repeated),
        tuple(source.name for source in kept if not source.is_finished),
        unit,
        chosen,
        observer,
        found,
        not known,
    )


def _total(
    key: str,
    sources: Sequence[Source],
    delta: float | None,
    accountants: Sequence[AccountantChoice],
    adjacency: Adjacency,
) -> ClientTotal:
    own = [source for source in sources if key in source.ledgers]
    delta = _delta(key, own) if delta is None else delta
    total, server = PrivacyLedger(), PrivacyLedger()
    for source in own:
        total.merge(source.ledgers[key])
        server.merge((source.against_server or {}).get(key, PrivacyLedger()))
    runs = sum(source.terms is not None for source in own)
    has_server = bool(own) and all(source.against_server is not None for source in own)
    who = f"client {key}" if key else "the ledger"
    epsilons = {
        accountant_name(one): _epsilon(total, delta, one, adjacency, runs, who=who)
        for one in accountants
    }
    return ClientTotal(
        key,
        next((source.names[key] for source in own if key in source.names), None),
        tuple(source.name for source in own),
        total,
        delta,
        epsilons,
        _epsilon(server, delta, accountants[0], adjacency, runs, who=who) if has_server else None,
    )


def _epsilon(
    ledger: PrivacyLedger,
    delta: float,
    accountant: AccountantChoice,
    adjacency: Adjacency,
    runs: int,
    *,
    who: str,
) -> float:
    """Return ε of a ledger, with the slack of the sampler once for each run of fedsim.

    The slack of a run covers the values that the run may draw. Replacing the noise of one run after
    another by what was drawn adds it each time.
    """
    try:
        account = ledger.compose_into(make_accountant(accountant, adjacency=adjacency))
    except UnsupportedEventError as error:
        raise SourceError(
            f"{who}: {error}; under {adjacency} adjacency there is no ε. Pass the --adjacency that "
            "the events hold under"
        ) from error
    get_epsilon: Callable[[float], float] = account.get_epsilon
    for _ in range(runs):
        get_epsilon = partial(epsilon_with_slack, get_epsilon)
    return get_epsilon(delta)


def _delta(key: str, sources: Sequence[Source]) -> float:
    deltas = [source.terms.deltas[key] for source in sources if source.terms is not None]
    found = {delta for delta in deltas if delta is not None}
    if len(found) != 1 or None in deltas:
        given = "no δ" if not found else "several δ: " + ", ".join(f"{d:g}" for d in sorted(found))
        who = f"client {key}" if key else "the ledger"
        raise SourceError(f"{who} has {given}; pass the δ of the total with --delta")
    return found.pop()


def _terms(
    sources: Sequence[Source], adjacency: Adjacency | None, accountants: Sequence[AccountantChoice]
) -> tuple[str | None, Adjacency, Observer | None, Sequence[AccountantChoice]]:
    """Return unit, adjacency, observer and accountants that all runs share."""
    runs = [(source.name, source.terms) for source in sources if source.terms is not None]
    if not runs:
        return None, adjacency or "zero_out", None, accountants or ("pld",)
    first_name, first = runs[0]
    for name, terms in runs[1:]:
        for what in ("unit", "adjacency", "observer"):
            one, other = getattr(first, what), getattr(terms, what)
            if one != other:
                raise SourceError(
                    f"{first_name} has {what} {one!r} and {name} {other!r}: an ε of both together "
                    f"has no meaning; account for the runs of each {what} apart"
                )
    if adjacency not in (None, first.adjacency):
        raise SourceError(
            f"--adjacency {adjacency}: {first_name} holds under {first.adjacency} adjacency only"
        )
    used = {terms.accountant for _, terms in runs}
    default: AccountantChoice = first.accountant if len(used) == 1 else "pld"
    return first.unit, first.adjacency, first.observer, accountants or (default,)


def _refuse_common_noise(sources: Sequence[Source]) -> None:
    """Refuse different runs with seeded noise of one seed: noise of one cancels that of the other.

    Noise is keyed by (seed, client, round), so only clients of both runs share it.
    """
    seeded = [one for one in sources if one.terms is not None and one.terms.seed is not None]
    for one, other in combinations(seeded, 2):
        if one.terms is None or other.terms is None or one.terms.seed != other.terms.seed:
            continue
        if repeats(one, other) or repeats(other, one):
            continue
        raise SourceError(
            f"{one.name} and {other.name} have seed {one.terms.seed} and seeded noise, so the "
            "noise of one is that of the other, and together they have no ε. Give each run a seed "
            "of its own, or use privacy.noise: secure; --independent-noise accounts for what the "
            "two simulate, with noise of their own"
        )


def _refuse_mixture(sources: Sequence[Source]) -> None:
    unnamed = [source.name for source in sources if EVERYONE in source.ledgers]
    named = [source.name for source in sources if set(source.ledgers) - {EVERYONE}]
    if unnamed and named:
        raise SourceError(
            f"{unnamed[0]} names no client, and {named[0]} does: say whose it is with --clients "
            "FILE, a map from each client to its places"
        )


def _refuse_same_name(sources: Sequence[Source]) -> None:
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"{twice} is given twice")


def _mapped(sources: Sequence[Source], clients: Mapping[str, Sequence[str]]) -> list[Source]:
    """Return the sources with the keys of a map, which must place every client once."""
    places: dict[str, str] = {}
    for client, given in clients.items():
        for place in given:
            if place in places:
                raise SourceError(f"--clients: {place} is in {places[place]} and in {client}")
            places[place] = client
    found = list[Source]()
    for source in sources:
        own = {
            key: source.name if key == EVERYONE else f"{source.name}:{key}"
            for key in source.ledgers
        }
        missing = [place for place in own.values() if place not in places]
        if missing:
            raise SourceError(
                f"--clients: {missing[0]} is in no entry, so its spend would be in no total"
            )
        keys = {key: places.pop(place) for key, place in own.items()}
        if len(set(keys.values())) < len(keys):
            raise SourceError(f"--clients: an entry has two clients of {source.name}")
        found.append(renamed(source, keys))
    if places:
        raise SourceError(f"--clients: {next(iter(places))} is no client of any source")
    return found


def _by_number(key: str) -> tuple[float, str]:
    return (float(key), "") if key.isdigit() else (math.inf, key)


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value

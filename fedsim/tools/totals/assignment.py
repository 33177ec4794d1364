"""Matching of clients between runs, and the guarantee if it is not known which clients match."""

from collections.abc import Sequence
from itertools import product
from math import prod

from fedsim.accountant import Event, Gaussian, PoissonSampled, PrivacyLedger
from fedsim.clients.mechanisms.kinds import protects_client
from fedsim.tools.totals.sources import Source, SourceError, renamed

_MOST_CHOICES = 1000


def same_clients(sources: Sequence[Source]) -> bool:
    """Whether clients' names or numbers show which clients of several sources are the same.

    Args:
        sources: the sources, without repetitions.
    """
    runs = [source.terms for source in sources if source.terms is not None]
    return len(runs) < 2 or _have_names(sources) or len({run.assignment for run in runs}) == 1


def aligned(sources: Sequence[Source]) -> list[Source]:
    """Return the sources such that equal client keys mean the same client in all of them.

    If several runs all have unique names for their clients, the keys are these names. Otherwise the
    keys stay as they are: clients' numbers, or the keys of a file.
    """
    several = sum(source.terms is not None for source in sources) > 1
    if not several or not _have_names(sources):
        return list(sources)
    return [
        s if s.terms is None else renamed(s, {name: client for client, name in s.names.items()})
        for s in sources
    ]


def _have_names(sources: Sequence[Source]) -> bool:
    """Whether every client of every run has a name that no other client of the run has."""
    runs = [source for source in sources if source.terms is not None]
    is_unique = all(len(set(run.names.values())) == len(run.names) for run in runs)
    return is_unique and all(run.ledgers.keys() <= run.names.keys() for run in runs)


def every_choice(sources: Sequence[Source]) -> list[Source]:
    """Return copies of the sources whose client keys stand for combinations of clients.

    A combination is one client of each source. All of them are needed if it is not known which
    clients of the sources are the same. A combination is left out if one of its clients spends no
    more than another client of the same source.

    Args:
        sources: the sources, whose clients cannot be matched.

    Raises:
        SourceError: the privacy unit is a client, or there are too many combinations.
    """
    way_out = (
        "use one seed and secure noise, a partition by a column or files, or --clients FILE where "
        "you know which clients are the same"
    )
    if any(source.terms is not None and protects_client(source.terms.unit) for source in sources):
        raise SourceError(
            f"{sources[0].name} and {sources[1].name} divide the data among clients by another "
            f"draw, so no client of one is a client of the other, and none has a total; {way_out}"
        )
    kept = [_largest(source) for source in sources]
    if prod(len(keys) for keys in kept) > _MOST_CHOICES:
        raise SourceError(
            "the partitions are drawn with several seeds, so an example may be in any client of "
            f"each run, and the clients of {sources[0].name} spent {len(kept[0])} different "
            f"amounts: too many combinations to add up; {way_out}"
        )
    names = [dict[str, str]() for _ in sources]
    choices = list(product(*kept))
    for number, choice in enumerate(choices, 1):
        for new, client in zip(names, choice, strict=True):
            new["any" if len(choices) == 1 else f"any ({number})"] = client
    return [renamed(source, new) for source, new in zip(sources, names, strict=True)]


def _largest(source: Source) -> list[str]:
    """Return clients of a source such that every other client spent no more than one of them."""
    kept: list[str] = []
    for client in source.ledgers:
        if any(_covers(source, other, client) for other in kept):
            continue
        kept = [other for other in kept if not _covers(source, client, other)]
        kept.append(client)
    return kept


def _covers(source: Source, client: str, other: str) -> bool:
    """Return whether `client` spent at least as much as `other`, at every δ."""
    if source.terms is not None and source.terms.deltas[client] != source.terms.deltas[other]:
        return False
    views = [source.ledgers, *([source.against_server] if source.against_server else [])]
    return all(_dominates(view[client], view[other]) for view in views)


def _dominates(ledger: PrivacyLedger, other: PrivacyLedger) -> bool:
    """Return whether a ledger has the other's events, with no smaller rate and no more noise.

    A Poisson-sampled Gaussian loses more with a larger rate, with less noise and with more steps.
    """
    if ledger.entries == other.entries:
        return True
    pairs = list(zip(ledger.entries, other.entries, strict=False))
    return len(ledger) == len(other) == len(pairs) and all(
        count >= less and _is_larger(event, smaller) for (event, count), (smaller, less) in pairs
    )


def _is_larger(event: Event, other: Event) -> bool:
    if isinstance(event, Gaussian) and isinstance(other, Gaussian):
        return event.noise_multiplier <= other.noise_multiplier
    if isinstance(event, PoissonSampled) and isinstance(other, PoissonSampled):
        return event.sampling_rate >= other.sampling_rate and _is_larger(event.event, other.event)
    return event == other

"""Matching of clients between runs, and the guarantee if it is not known which clients match."""

from collections.abc import Sequence
from itertools import product
from math import prod

from fedsim.accountant import Event, Gaussian, PoissonSampled, PrivacyLedger
from fedsim.clients.mechanisms.kinds import protects_client
from fedsim.tools.totals.sources import Source, SourceError, renamed

_MOST_CHOICES = 1000


def matched(sources: Sequence[Source]) -> tuple[list[Source], bool]:
    """Return the sources such that equal client keys mean the same client, and whether they do.

    If several runs all have unique names for their clients, the keys are these names. Otherwise the
    keys stay as they are (clients' numbers, or the keys of a file), if equal numbers have the same
    examples in all runs. Otherwise it is not known which clients are the same: the result is
    `every_choice` and False.

    Args:
        sources: the sources, without repetitions.
    """
    runs = [source for source in sources if source.is_run]
    if len(runs) < 2:
        return list(sources), True
    if all(_has_names(run) for run in runs):
        return [
            renamed(s, {name: client for client, name in s.names.items()}) if s.is_run else s
            for s in sources
        ], True
    if len({run.assignment for run in runs}) == 1:
        return list(sources), True
    return every_choice(sources), False


def _has_names(run: Source) -> bool:
    """Whether every client of a run has a name that no other client of the run has."""
    is_unique = len(set(run.names.values())) == len(run.names)
    return is_unique and run.ledgers.keys() <= run.names.keys()


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
    if any(protects_client(source.unit or "") for source in sources):
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
    if source.deltas.get(client) != source.deltas.get(other):
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

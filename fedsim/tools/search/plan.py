"""The plan of a search: the charge for each run, which is the same for all candidates.

All candidates must have the same privacy events, except for small differences in noise. The plan
follows from settings and public sizes, as clients' plans are fixed before round 1.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.events import Adjacency, to_dict
from fedsim.accountant.rdp.selection import RunCountDistribution
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.comparison.differences import pair_digests
from fedsim.comparison.jobs import run_fingerprint
from fedsim.comparison.load import LoadedComparison
from fedsim.comparison.settings import SearchSettings, SelectSettings
from fedsim.core.errors import InputError
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.plan_checks import refuse_overspending
from fedsim.tools.search.ledger import ClientCharge

GRID_SHARE = 1e-3  # relative: what the grid of models of different sizes leaves of the same noise

_NOISE = ("noise_multiplier", "noise_multipliers")


class SearchError(InputError):
    """Error of a search that cannot start or continue; the message names the fix."""


class OtherEventError(ValueError):
    """Error of two candidates whose privacy events differ, although they must be equal."""


@dataclass(frozen=True)
class SearchPlan:
    """Privacy cost that every run of a search charges, with digests of what the runs depend on.

    The digests show whether a later search has the same data and candidates.

    Attributes:
        digest: SHA-256 of everything that the runs depend on.
        data: keyed digest of the clients' examples and the test set.
        adjacency: adjacency of the guarantees.
        draws: maximum number of noise values that a client draws in one run.
        clients: the charge to each client for one run.
    """

    digest: str
    data: str
    adjacency: Adjacency
    draws: int
    clients: tuple[ClientCharge, ...]


@dataclass(frozen=True)
class SearchCandidate:
    """The planned releases of one candidate of a search.

    Attributes:
        name: name of the candidate.
        data: keyed digest of the clients' examples and the test set.
        adjacency: adjacency of the guarantees.
        deltas: δ of each client.
        ledgers: planned events of each client.
        draws: maximum number of noise values that a client draws in one run.
    """

    name: str
    data: str
    adjacency: Adjacency
    deltas: tuple[float, ...]
    ledgers: tuple[PrivacyLedger, ...]
    draws: int


def plan_search(
    comparison: LoadedComparison, select: SelectSettings, search: SearchSettings
) -> SearchPlan:
    """Return the plan of a search: the charge for each run.

    Guarantee: for every client, the releases of one run of any candidate are post-processing of the
    charged events: they have the same sampling and counts, and at least the charged noise.

    Args:
        comparison: the loaded comparison file.
        select: the `select` section of the file.
        search: the `select.search` section of the file.

    Raises:
        SearchError: a candidate differs in events, data or metric, or has no finite ε.
        PrivacyBudgetError: a candidate exceeds a client's budget.
    """
    candidates: list[SearchCandidate] = []
    prints: dict[str, str] = {}
    for variant in comparison.candidates:
        loaded = variant.experiments[0]
        federation = assemble(loaded, ledger=None)
        refuse_overspending(federation)
        _check_metric(variant.name, federation, select.metric)
        candidates.append(_candidate(variant.name, federation))
        prints[variant.name] = run_fingerprint(loaded)
    first, *others = candidates
    for other in others:
        if other.data != first.data:
            raise SearchError(f"candidates {first.name!r} and {other.name!r} have other data")
    clients = common_charges(candidates)
    draws = max(candidate.draws for candidate in candidates)
    _check_draws(draws, RunCountDistribution(search.mean, search.eta))
    content = {
        "candidates": prints,
        "metric": select.metric,
        "distribution": [search.mean, search.eta],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return SearchPlan(digest, first.data, first.adjacency, draws, clients)


def _candidate(name: str, federation: Federation) -> SearchCandidate:
    privacy, plans = federation.experiment.privacy, federation.plan.clients
    if privacy is None or plans is None:
        raise SearchError(f"candidate {name!r} has no privacy")
    ledgers = []
    for plan in plans:
        ledger = PrivacyLedger()
        for event, count in plan.release.charges(0, plan.steps_to_take):
            ledger.record(event, count)
        if ledger.epsilon(plan.delta, "rdp", privacy.adjacency.name) == float("inf"):
            raise SearchError(f"candidate {name!r} has no finite ε, so its runs cannot be charged")
        ledgers.append(ledger)
    values = federation.model.shared.parameters.size
    return SearchCandidate(
        name=name,
        data=pair_digests(federation)["data"],
        adjacency=privacy.adjacency.name,
        deltas=tuple(plan.delta for plan in plans),
        ledgers=tuple(ledgers),
        draws=max(plan.steps_to_take for plan in plans) * (values + 1),
    )


def _check_metric(name: str, federation: Federation, metric: str) -> None:
    known = federation.test_metrics(federation.initial_arrays())
    if metric not in known:
        raise SearchError(
            f"select.metric: candidate {name!r} has no {metric}; it has {', '.join(known)}"
        )


def _check_draws(draws: int, run_counts: RunCountDistribution) -> None:
    """Refuse a search in which a client may draw more noise than the sampler's slack covers."""
    if run_counts.most_runs * draws > MAX_DRAWS // 2:
        raise SearchError(
            f"a client would draw up to {run_counts.most_runs * draws:.2g} values of noise (up to "
            f"{run_counts.most_runs:,} runs of {draws:.2g}), and the proof covers "
            f"{MAX_DRAWS // 2:.0e}: lower select.search.mean, the rounds or the size of the model"
        )


def common_charges(candidates: Sequence[SearchCandidate]) -> tuple[ClientCharge, ...]:
    """Return the charge to each client for one run, with the least noise of any candidate."""
    first = candidates[0]
    charges = [
        ClientCharge(client=client, delta=delta, ledger=ledger.to_list())
        for client, (delta, ledger) in enumerate(zip(first.deltas, first.ledgers, strict=True))
    ]
    for other in candidates[1:]:
        if other.adjacency != first.adjacency or other.deltas != first.deltas:
            raise SearchError(
                f"candidates {first.name!r} and {other.name!r} have another adjacency or δ: a "
                "search needs one guarantee for all; set both in the base"
            )
        for charge, ledger in zip(charges, other.ledgers, strict=True):
            try:
                common = least_noise(charge.ledger, ledger.to_list())
            except OtherEventError:
                raise SearchError(_other_event(first, other, charge.client)) from None
            charges[charge.client] = charge.model_copy(update={"ledger": common})
    return tuple(charges)


def least_noise(first: Any, second: Any, key: str = "") -> Any:
    """Merge the JSON forms of two events into one with the smaller of each noise multiplier.

    Noise multipliers may differ by the relative tolerance `GRID_SHARE`. The event with less noise
    is charged, since a release with more noise is post-processing of one with less.

    Args:
        first: the first event, or a part of it.
        second: the second event, or the same part of it.
        key: the key of the part.

    Raises:
        OtherEventError: the events differ in anything but their noise multipliers.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {name: least_noise(first[name], second[name], name) for name in first}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [least_noise(*pair, key) for pair in zip(first, second, strict=True)]
    if isinstance(first, float) and isinstance(second, float) and key in _NOISE:
        return _least(first, second)
    if first != second:
        raise OtherEventError
    return first


def _least(noise: float, other: float) -> float:
    """Return the smaller of two noise multipliers that are equal up to the grid."""
    if abs(noise - other) > GRID_SHARE * max(noise, other):
        raise OtherEventError
    return min(noise, other)


def _other_event(first: SearchCandidate, other: SearchCandidate, client: int) -> str:
    return (
        f"candidates {first.name!r} and {other.name!r} have other events: client {client} would be "
        f"charged {_events_text(first.ledgers[client])} for the one and "
        f"{_events_text(other.ledgers[client])} for the other; a search needs one event, so give "
        "all candidates the same sampling rate, steps, rounds and noise"
    )


def _events_text(ledger: PrivacyLedger) -> str:
    return " and ".join(f"{count} x {event!r}" for event, count in ledger.entries) or "nothing"


def is_within(spent: PrivacyLedger, charge: ClientCharge) -> bool:
    """Return whether a run spent at most its charge: only charged events, each at most as often.

    Args:
        spent: the client's events in the run's durable ledger.
        charge: the charge for one run.
    """
    charged = [to_dict(event) for event, _ in charge.events.entries]
    left = [count for _, count in charge.events.entries]
    for event, count in spent.entries:
        place = next(
            (n for n, charge in enumerate(charged) if _covers(charge, to_dict(event))), None
        )
        if place is None:
            return False
        left[place] -= count
    return all(count >= 0 for count in left)


def _covers(charged: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Return whether an event equals the charged one, with at least as much noise."""
    try:
        return least_noise(charged, event) == charged
    except OtherEventError:
        return False

"""The plan of a search: candidates whose runs are one and the same event, and what one run costs.

Everything here follows from settings and public sizes: plans of clients are fixed before round 1.
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
    """A search that cannot be performed, or cannot go on; the message names the fix."""


class OtherEventError(ValueError):
    """Two events that are not one and the same."""


@dataclass(frozen=True)
class SearchPlan:
    """What is charged for each run of a search, and what its runs depend on.

    Attributes:
        digest: SHA-256 of everything that the runs depend on.
        data: SHA-256 of clients' examples and test set.
        adjacency: neighbouring datasets.
        draws: most values of noise that a client draws in one run.
        clients: the charge of one run.
    """

    digest: str
    data: str
    adjacency: Adjacency
    draws: int
    clients: tuple[ClientCharge, ...]


@dataclass(frozen=True)
class SearchCandidate:
    """What one candidate releases.

    Attributes:
        name: its name.
        data: SHA-256 of clients' examples and test set.
        adjacency: neighbouring datasets.
        deltas: δ of each client.
        ledgers: planned events of each client.
        draws: most values of noise that a client draws.
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
    """Return the plan of a search.

    Guarantee: for every client, the releases of one run of any candidate are post-processing of the
    charged events: the same samplings and counts, with at least the charged noise.

    Args:
        comparison: the loaded file.
        select: its `select` section.
        search: its `select.search` section.

    Raises:
        SearchError: a candidate has another event, data or metric, or no finite ε.
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
    draws = max(one.draws for one in candidates)
    _check_draws(draws, RunCountDistribution(search.mean, search.eta))
    content = {"candidates": prints, "metric": select.metric, "law": [search.mean, search.eta]}
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


def _check_draws(draws: int, law: RunCountDistribution) -> None:
    """Refuse a search in which a client may draw more noise than the sampler's slack covers."""
    if law.most_runs * draws > MAX_DRAWS // 2:
        raise SearchError(
            f"a client would draw up to {law.most_runs * draws:.2g} values of noise (up to "
            f"{law.most_runs:,} runs of {draws:.2g}), and the proof covers {MAX_DRAWS // 2:.0e}: "
            "lower select.search.mean, the rounds or the size of the model"
        )


def common_charges(candidates: Sequence[SearchCandidate]) -> tuple[ClientCharge, ...]:
    """Return the event of one run for each client, with the least noise of any candidate."""
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


def least_noise(one: Any, other: Any, key: str = "") -> Any:
    """Return the JSON form of two events as one, with the smaller noise multipliers.

    Noise multipliers may differ by `GRID_SHARE`. A release with less noise is charged: one with
    more noise is post-processing of it.

    Args:
        one: an event, or a part of it.
        other: the same part of the other event.
        key: the key of the part.

    Raises:
        OtherEventError: they differ in anything else.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other):
        return {name: least_noise(one[name], other[name], name) for name in one}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [least_noise(*pair, key) for pair in zip(one, other, strict=True)]
    if isinstance(one, float) and isinstance(other, float) and key in _NOISE:
        return _least(one, other)
    if one != other:
        raise OtherEventError
    return one


def _least(one: float, other: float) -> float:
    """Return the smaller of two noise multipliers that are the same but for the grid."""
    if abs(one - other) > GRID_SHARE * max(one, other):
        raise OtherEventError
    return min(one, other)


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
    """Whether what a run spent is part of its charge: the same events, no more of each.

    Args:
        spent: everything in the run's durable ledger for the client.
        charge: the charge of one run.
    """
    charged = [to_dict(event) for event, _ in charge.events.entries]
    left = [count for _, count in charge.events.entries]
    for event, count in spent.entries:
        place = next((n for n, one in enumerate(charged) if _covers(one, to_dict(event))), None)
        if place is None:
            return False
        left[place] -= count
    return all(count >= 0 for count in left)


def _covers(charged: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Whether an event is the charged one, with at least its noise."""
    try:
        return least_noise(charged, event) == charged
    except OtherEventError:
        return False

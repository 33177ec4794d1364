"""The plan of a search: the charge for each run, which is the same for all candidates.

It follows from settings and public sizes, as clients' plans are fixed before round 1.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.events import to_dict
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.comparison.jobs import run_fingerprint
from fedsim.comparison.load import LoadedComparison, LoadedVariant
from fedsim.comparison.settings import SearchSettings
from fedsim.core.errors import InputError
from fedsim.federation.assembly import assemble, refuse_overspending
from fedsim.planning.alternatives import privacy_of
from fedsim.runs.inputs import fingerprint
from fedsim.tools.search.ledger import ClientCharge, SearchPlan

GRID_SHARE = 1e-3  # relative: what the grid of models of different sizes leaves of the same noise
_NOISE = ("noise_multiplier", "noise_multipliers")


class SearchError(InputError):
    """Error of a search that cannot start or continue; the message names the fix."""


class OtherEventError(ValueError):
    """Error of two candidates whose privacy events differ, although they must be equal."""


def plan_search(comparison: LoadedComparison) -> SearchPlan:
    """Return the plan of a search: the charge for each run.

    Guarantee: for every client, the releases of one run of any candidate are post-processing of the
    charged events: they have the same sampling and counts, and at least the charged noise.

    Raises:
        SearchError: a candidate differs in events, data or metric, or has no finite ε.
        PrivacyBudgetError: a candidate exceeds a client's budget.
    """
    select = comparison.settings.select
    if select is None or select.search is None:
        raise ValueError("the file describes no search")
    plans = [_plan_of(one, select.metric, select.search) for one in comparison.candidates]
    content = {
        "candidates": {plan.candidates[0]: plan.digest for plan in plans},
        "metric": select.metric,
        "distribution": (select.search.mean, select.search.eta),
    }
    changes = {
        "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        "candidates": [one.name for one in comparison.candidates],
        "draws": max(plan.draws for plan in plans),
        "clients": common_charges(plans),
    }
    plan = plans[0].model_copy(update=changes)
    most_runs = plan.run_counts.most_runs
    if most_runs * plan.draws > MAX_DRAWS // 2:  # more than the sampler's slack covers
        raise SearchError(
            f"a client would draw up to {most_runs * plan.draws:.2g} values of noise (up to "
            f"{most_runs:,} runs of {plan.draws:.2g}), and the proof covers "
            f"{MAX_DRAWS // 2:.0e}: lower select.search.mean, the rounds or the size of the model"
        )
    return plan


def _plan_of(candidate: LoadedVariant, metric: str, search: SearchSettings) -> SearchPlan:
    """Return the plan of a search with a single candidate."""
    name, federation = candidate.name, assemble(candidate.loaded, ledger=None)
    refuse_overspending(federation)
    known = federation.test_metrics(federation.initial_arrays())
    if metric not in known:
        has = f"it has {', '.join(known)}"
        raise SearchError(f"select.metric: candidate {name!r} has no {metric}; {has}")
    privacy, plans = privacy_of(federation.experiment), federation.plan.clients or ()
    clients = []
    for client, plan in enumerate(plans):
        ledger = PrivacyLedger.of(plan.release.charges(0, plan.steps_to_take))
        if ledger.epsilon(plan.delta, "rdp", privacy.adjacency.name) == float("inf"):
            raise SearchError(f"candidate {name!r} has no finite ε, so its runs cannot be charged")
        clients.append(ClientCharge(client=client, delta=plan.delta, ledger=ledger))
    values = federation.model.shared.parameters.size
    return SearchPlan(
        digest=run_fingerprint(candidate.loaded),
        data=fingerprint(federation)["data"],
        candidates=[name],
        metric=metric,
        mean=search.mean,
        shape=search.eta,
        adjacency=privacy.adjacency.name,
        draws=max(plan.steps_to_take for plan in plans) * (values + 1),
        clients=clients,
    )


def common_charges(plans: Sequence[SearchPlan]) -> list[ClientCharge]:
    """Return the charge to each client for one run, with the least noise of any candidate."""
    first, *others = plans
    charges = list(first.clients)
    for other in others:
        both = f"candidates {first.candidates[0]!r} and {other.candidates[0]!r}"
        if other.data != first.data:
            raise SearchError(f"{both} have other data")
        deltas = [[charge.delta for charge in given.clients] for given in (first, other)]
        if other.adjacency != first.adjacency or deltas[0] != deltas[1]:
            raise SearchError(
                f"{both} have another adjacency or δ: a search needs one guarantee for all; set "
                "both in the base"
            )
        for client, planned in enumerate(other.clients):
            try:
                both_ledgers = charges[client].ledger.to_list(), planned.ledger.to_list()
                ledger = PrivacyLedger.from_list(least_noise(*both_ledgers))
            except OtherEventError:
                raise SearchError(
                    f"{both} have other events: client {client} would be charged "
                    f"{_events_text(first.clients[client])} for the one and "
                    f"{_events_text(planned)} for the other; a search needs one event, so give "
                    "all candidates the same sampling rate, steps, rounds and noise"
                ) from None
            charges[client] = charges[client].model_copy(update={"ledger": ledger})
    return charges


def _events_text(charge: ClientCharge) -> str:
    return " and ".join(f"{n} x {event!r}" for event, n in charge.ledger.entries) or "nothing"


def least_noise(first: Any, second: Any, key: str = "") -> Any:
    """Merge two events as JSON, equal but for noise, into one with the least noise.

    Noise may differ by `GRID_SHARE`. A release with more noise is post-processing of one with less.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {name: least_noise(first[name], second[name], name) for name in first}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [least_noise(*pair, key) for pair in zip(first, second, strict=True)]
    if isinstance(first, float) and isinstance(second, float) and key in _NOISE:
        if abs(first - second) > GRID_SHARE * max(first, second):
            raise OtherEventError
        return min(first, second)
    if first != second:
        raise OtherEventError
    return first


def is_within(spent: PrivacyLedger, charge: ClientCharge) -> bool:
    """Return whether a run spent at most its charge: only charged events, each at most as often."""
    charged = [to_dict(event) for event, _ in charge.ledger.entries]
    left = [count for _, count in charge.ledger.entries]
    for event, count in spent.entries:
        covering = (n for n, one in enumerate(charged) if _covers(one, to_dict(event)))
        place = next(covering, None)
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

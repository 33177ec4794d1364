"""Functions for the state of a privacy engine (`state_dict`), its ε and its remaining budget."""

from collections.abc import Mapping
from typing import Any

from fedsim.accountant import (
    Accountant,
    Event,
    PrivacyLedger,
    PrivacySpent,
    RdpAccountant,
    make_accountant,
)
from fedsim.accountant.privacy_filter import PrivacyFilter
from fedsim.accountant.sampler_slack import SHARE, epsilon_with_slack, target_without_slack
from fedsim.accountant.search import largest_count
from fedsim.clients.privacy_engine.batch_schedule import EngineStreams
from fedsim.clients.privacy_engine.steps import PrivateSteps
from fedsim.clients.privacy_engine.terms import PrivacyTerms

_SCHEMA = 2


def engine_state(
    steps: PrivateSteps, streams: EngineStreams, terms: PrivacyTerms
) -> dict[str, Any]:
    """Return the state of an engine as plain values.

    Args:
        steps: the engine's steps, with ledger, schedule and clipping.
        streams: the engine's random streams, with the seed.
        terms: the engine's public terms, with the noise multiplier.

    Raises:
        RuntimeError: a batch is unfinished, so its sum has no noise yet.
    """
    if steps.is_open:
        raise RuntimeError(
            "a batch is unfinished: the sum of virtual_step() has no noise yet and must not be "
            "stored; call optimizer.step() first"
        )
    return {
        "schema": _SCHEMA,
        "noise_multiplier": terms.noise_multiplier,
        "ledger": steps.ledger.to_list(),
        "schedule": steps.schedule.state(),
        "streams": streams.state(),
        "clipping": steps.clipping_state(),
        "losses": steps.losses.state(),
    }


def restore_state(
    state: Mapping[str, Any], steps: PrivateSteps, streams: EngineStreams, terms: PrivacyTerms
) -> None:
    """Restore the state of an engine; after an error the engine is unchanged.

    Guarantee: no charge of this engine is lost.

    Args:
        state: the state that `engine_state` returned.
        steps: the engine's steps, whose ledger, schedule and clipping are restored.
        streams: the engine's random streams, whose seed is restored.
        terms: the engine's public terms.

    Raises:
        ValueError: the state has another schema or noise, or lacks charges of this engine.
    """
    if state.get("schema") != _SCHEMA:
        raise ValueError(
            f"not the state of this version's privacy engine: schema {state.get('schema')!r}, not "
            f"{_SCHEMA}; train on with the version that wrote it, or from the start"
        )
    ledger, taken = PrivacyLedger.from_list(state["ledger"]), state["schedule"]["steps"]
    ours = steps.schedule.steps
    if steps.is_open or ours > taken or not ledger.starts_with(steps.ledger):
        raise ValueError(
            f"this engine has taken {ours} steps, and the state of {taken} steps does not contain "
            "them; loading it would erase their charges. Load it into a new engine"
        )
    if terms.planned_steps and state["noise_multiplier"] != terms.noise_multiplier:
        raise ValueError(
            f"the noise was calibrated to {terms.noise_multiplier:g} for all planned steps, but "
            f"the state's steps had {state['noise_multiplier']:g}; make the engine with the same "
            "arguments"
        )
    steps.ledger = ledger
    steps.schedule.restore(state["schedule"])
    steps.losses.restore(state["losses"])
    streams.restore(state["streams"])
    if state["clipping"] is not None:
        steps.clipping_from(state["clipping"])


def ledger_spent(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> PrivacySpent:
    """Return the ε of a ledger, computed by the accountant of the engine's terms.

    ε includes a small term, because the sampled noise is not exactly Gaussian.

    Args:
        ledger: the ledger with all charges.
        terms: the engine's public terms, with accountant, adjacency and target δ.
        delta: δ; None stands for the target δ.

    Returns:
        ε at δ, and the Rényi order that gives it.
    """
    account, delta = _account(ledger, terms), _delta(terms, delta)
    epsilon = epsilon_with_slack(account.get_epsilon, delta)
    return PrivacySpent(epsilon, delta, account.get_privacy_spent(delta * (1.0 - SHARE)).best_order)


def affordable_events(
    ledger: PrivacyLedger,
    terms: PrivacyTerms,
    event: Event,
    target_epsilon: float,
    delta: float | None,
) -> int | None:
    """Return how often an event can be repeated within a budget.

    The result is None if the ε of the ledger is above the budget already.

    Args:
        ledger: the ledger with all charges so far.
        terms: the engine's public terms, with accountant, adjacency and target δ.
        event: the event to repeat.
        target_epsilon: ε of the budget.
        delta: δ of the budget; None stands for the target δ.
    """
    limit, inner_delta = target_without_slack(target_epsilon, _delta(terms, delta))
    if terms.alphas is not None:
        if _account(ledger, terms).get_epsilon(inner_delta) > limit:
            return None
        return largest_count(
            lambda n: _account(ledger, terms).compose(event, n).get_epsilon(inner_delta), limit
        )
    budget = PrivacyFilter(
        limit, inner_delta, accountant=terms.accountant, adjacency=terms.adjacency
    )
    for entry, count in ledger.entries:
        budget.record(entry, count)
    return None if budget.spent > budget.target_epsilon else budget.max_count(event)


def _account(ledger: PrivacyLedger, terms: PrivacyTerms) -> Accountant:
    """Return the accountant of the terms, with all charges of a ledger composed."""
    if terms.alphas is None:
        account = make_accountant(terms.accountant, adjacency=terms.adjacency)
    else:
        account = RdpAccountant(terms.alphas, adjacency=terms.adjacency)
    return ledger.compose_into(account)


def _delta(terms: PrivacyTerms, delta: float | None) -> float:
    return terms.target_delta if delta is None else delta

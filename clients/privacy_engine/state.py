"""State of a privacy engine: `state_dict` and its restoration."""

from collections.abc import Mapping
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.clients.privacy_engine.lot_schedule import EngineStreams
from fedsim.clients.privacy_engine.steps import PrivateSteps
from fedsim.clients.privacy_engine.terms import PrivacyTerms

_SCHEMA = 2


def engine_state(
    steps: PrivateSteps, streams: EngineStreams, terms: PrivacyTerms
) -> dict[str, Any]:
    """Return the state as plain values.

    Args:
        steps: ledger, schedule and clipping.
        streams: the seed.
        terms: the noise multiplier.

    Raises:
        RuntimeError: a lot is open.
    """
    if steps.is_open:
        raise RuntimeError(
            "a lot is open: the sum of virtual_step() has no noise yet and must not be stored; "
            "call optimizer.step() first"
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
    """Restore a state, all of it or nothing.

    Guarantee: no charge of this engine is lost.

    Args:
        state: of `engine_state`.
        steps: restored: ledger, schedule and clipping.
        streams: restored: the seed.
        terms: of this engine.

    Raises:
        ValueError: the state is of another schema or noise, or lacks charges of this engine.
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
            f"this engine has taken {ours} steps that the state, of {taken}, does not have; to "
            "load it would un-spend them. Load it into a new engine"
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

"""Faults strike by the seed, and what a failing client says holds nothing private."""

import traceback
from itertools import pairwise

import pytest
from pydantic import ValidationError

from fedsim.accountant.ledger.journal import JournalError
from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.faults import ClientFailureError, Fault, FaultPlan, redact_error


def plan(*faults: FaultSettings, seed: int = 3) -> FaultPlan:
    return FaultPlan(seed, faults)


def test_a_fault_strikes_whom_and_when_it_says() -> None:
    faults = plan(
        FaultSettings(kind="dropout_before", clients=[1], rounds=[2, 4]),
        FaultSettings(kind="dropout_after", clients=[1, 2]),
    )
    assert faults.of(1, 2).uncharged == "dropped out before training (injected)"
    assert faults.of(1, 3).charged == "dropped out after training (injected)"
    assert faults.of(2, 2) == faults.of(1, 3)
    assert faults.of(0, 2) == Fault()


def test_faults_strike_as_often_as_they_say_and_independently() -> None:
    """4,000 draws of 0.3: 5 standard deviations are 0.036, so a false alarm is below 1e-6."""
    faults = plan(FaultSettings(kind="dropout_before", probability=0.3))
    hits = [
        [bool(faults.of(client, number).uncharged) for number in range(1, 41)]
        for client in range(100)
    ]
    assert abs(sum(map(sum, hits)) / 4000 - 0.3) < 0.036
    pairs = [a and b for row in hits for a, b in pairwise(row)]
    assert abs(sum(pairs) / len(pairs) - 0.09) < 0.03
    assert hits != [
        [bool(plan(*faults.faults, seed=4).of(client, number).uncharged) for number in range(1, 41)]
        for client in range(100)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "straggler"},
        {"kind": "nan", "delay": 1.0},
        {"kind": "nan", "probability": 0.0},
        {"kind": "nan", "rounds": [0]},
        {"kind": "nan", "clients": []},
    ],
)
def test_impossible_faults_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FaultSettings.model_validate(fields)


def test_a_foreign_exception_says_its_type_and_line_only() -> None:
    def secret(value: float) -> None:
        raise KeyError(f"example {value}")

    with pytest.raises(KeyError) as caught:
        secret(4711.25)
    hidden = redact_error(caught.value)
    assert isinstance(hidden, ClientFailureError)
    assert str(hidden).startswith("KeyError at test_injection.py:")
    shown = "".join(traceback.format_exception(hidden))
    assert "4711" not in shown


@pytest.mark.parametrize("error", [ClientFailureError("why"), JournalError("record 3")])
def test_errors_of_our_own_keep_their_text(error: Exception) -> None:
    assert redact_error(error) is error

"""The ledger: append-only, run-length, JSON, and equal to composing the events."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import (
    Gaussian,
    NonPrivate,
    PoissonSampled,
    PrivacyLedger,
    RdpAccountant,
    UnsupportedEventError,
)

STEP = PoissonSampled(0.1, Gaussian(1.0))
ONCE = Gaussian(4.0)

records = st.lists(st.tuples(st.sampled_from([STEP, ONCE]), st.integers(0, 50)), max_size=6)


def ledger_of(entries: list[tuple[Any, int]]) -> PrivacyLedger:
    ledger = PrivacyLedger()
    for event, count in entries:
        ledger.record(event, count)
    return ledger


def test_equal_neighbours_share_an_entry() -> None:
    ledger = PrivacyLedger().record(STEP).record(STEP, 4).record(ONCE).record(STEP).record(ONCE, 0)
    assert ledger.entries == ((STEP, 5), (ONCE, 1), (STEP, 1))
    assert len(ledger) == 3


def test_json_form_is_the_contract() -> None:
    assert PrivacyLedger().record(ONCE, 3).to_list() == [
        {"event": {"type": "Gaussian", "noise_multiplier": 4.0}, "count": 3}
    ]


@given(records, records)
@settings(max_examples=60, deadline=None)
def test_guarantee_merging_and_json_keep_the_epsilon(first: Any, second: Any) -> None:
    merged = ledger_of(first).merge(ledger_of(second))
    assert merged == ledger_of(first + second)
    assert PrivacyLedger.from_list(json.loads(json.dumps(merged.to_list()))) == merged
    accountant = RdpAccountant()
    for event, count in first + second:
        accountant.compose(event, count)
    assert merged.epsilon(1e-5, accountant="rdp") == accountant.get_epsilon(1e-5)
    swapped = ledger_of(second).merge(ledger_of(first))
    assert swapped.epsilon(1e-5) == merged.epsilon(1e-5)


def test_merge_changes_only_the_ledger_it_is_called_on() -> None:
    one, two = PrivacyLedger().record(STEP), PrivacyLedger().record(STEP, 2)
    assert one.merge(two) is one
    assert one.entries == ((STEP, 3),)
    assert two.entries == ((STEP, 2),)
    assert one.merge(one).entries == ((STEP, 6),)


def test_equality() -> None:
    assert PrivacyLedger() == PrivacyLedger()
    assert PrivacyLedger().record(STEP, 2) == PrivacyLedger().record(STEP).record(STEP)
    assert PrivacyLedger().record(STEP) != PrivacyLedger().record(ONCE)
    assert PrivacyLedger() != []


def test_epsilon_by_either_accountant() -> None:
    ledger = PrivacyLedger().record(STEP, 100)
    assert ledger.epsilon(1e-5) < ledger.epsilon(1e-5, accountant="rdp")
    assert PrivacyLedger().epsilon(1e-5) == 0.0
    assert PrivacyLedger().record(NonPrivate()).epsilon(1e-5) == float("inf")


def test_a_ledger_records_what_an_accountant_cannot_account() -> None:
    ledger = PrivacyLedger().record(PoissonSampled(0.5, STEP))
    assert PrivacyLedger.from_list(ledger.to_list()) == ledger
    with pytest.raises(UnsupportedEventError):
        ledger.epsilon(1e-5)


def test_the_entries_cannot_be_changed_from_outside() -> None:
    ledger = PrivacyLedger().record(STEP)
    ledger.to_list().clear()
    assert isinstance(ledger.entries, tuple)
    assert len(ledger) == 1


@pytest.mark.parametrize("count", [-1, 0.5, float("nan"), "1"])
def test_bad_counts_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="count must be"):
        PrivacyLedger().record(STEP, count)


def test_bad_events_are_refused() -> None:
    bad: Any = {"type": "Gaussian"}
    with pytest.raises(ValueError, match="event must be a privacy event"):
        PrivacyLedger().record(bad)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"event": {"type": "NonPrivate"}}, r"ledger\[1\] must have the keys"),
        ({"event": {"type": "NonPrivate"}, "count": 1, "x": 1}, r"ledger\[1\] must have the keys"),
        ({"event": {"type": "Other"}, "count": 1}, r"ledger\[1\]: event type must be one of"),
        ({"event": {"type": "NonPrivate"}, "count": -1}, r"ledger\[1\]: count must be"),
        ("text", r"ledger\[1\] must have the keys"),
    ],
)
def test_from_list_names_the_broken_record(record: Any, message: str) -> None:
    good = {"event": {"type": "NonPrivate"}, "count": 1}
    with pytest.raises(ValueError, match=message):
        PrivacyLedger.from_list([good, record])

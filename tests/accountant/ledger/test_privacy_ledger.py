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


@given(records, records)
@settings(max_examples=20, deadline=None)
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


def test_the_text_keeps_every_digit() -> None:
    ledger = PrivacyLedger().record(STEP, 5).record(Gaussian(0.1 + 0.2))
    assert ledger.to_text() == (
        '[{"event": {"type": "PoissonSampled", "sampling_rate": 0.1, "event": {"type": "Gaussian", '
        '"noise_multiplier": 1.0}}, "count": 5}, {"event": {"type": "Gaussian", '
        '"noise_multiplier": 0.30000000000000004}, "count": 1}]'
    )
    # Another spelling of the same JSON is the same ledger.
    for spelled in (ledger.to_text(), json.dumps(json.loads(ledger.to_text()), indent=2)):
        assert PrivacyLedger.from_text(spelled) == ledger


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("{}", "a ledger must be a list"),
        ("[{}]", r"ledger\[0\] must have the keys"),
    ],
)
def test_from_text_names_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyLedger.from_text(text)


def test_replaying_into_an_accountant_and_adjacency() -> None:
    ledger = PrivacyLedger().record(ONCE, 3)
    assert ledger.epsilon(1e-5, adjacency="replace_one") > ledger.epsilon(1e-5)
    replayed = ledger.compose_into(RdpAccountant(orders=(8.0,)))
    assert replayed.history == ledger.entries


def test_only_what_was_recorded_first_starts_a_ledger() -> None:
    event, other = Gaussian(1.0), Gaussian(2.0)
    whole = PrivacyLedger().record(event, 5).record(other, 3)
    for prefix in (
        PrivacyLedger(),
        PrivacyLedger().record(event, 4),
        PrivacyLedger().record(event, 5),
        PrivacyLedger().record(event, 5).record(other, 2),
        whole,
    ):
        assert whole.starts_with(prefix)
    for another in (
        PrivacyLedger().record(other),
        PrivacyLedger().record(event, 6),
        PrivacyLedger().record(event, 4).record(other, 3),
        PrivacyLedger().record(event, 5).record(other, 4),
        PrivacyLedger().record(event, 5).record(other, 3).record(event),
    ):
        assert not whole.starts_with(another)


def test_a_ledger_is_its_prefix_and_what_was_recorded_after_it() -> None:
    event, other = Gaussian(1.0), Gaussian(2.0)
    whole = PrivacyLedger().record(event, 5).record(other, 3)
    shorter = [PrivacyLedger().record(event, count) for count in (0, 2, 5)]
    for prefix in (*shorter, whole):
        again = PrivacyLedger().merge(prefix)
        for entry, count in whole.entries_after(prefix):
            again.record(entry, count)
        assert again == whole
    with pytest.raises(ValueError, match="does not start with"):
        whole.entries_after(PrivacyLedger().record(other))

"""The budget of a node's data: never above the target, and tight for one run."""

from collections import Counter

import numpy as np
import pytest

from fedsim.accountant import (
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    PrivacyFilter,
    PrivacyLedger,
    UnsupportedEventError,
)
from fedsim.accountant.events import EpsilonDelta, FixedSizeSampled
from fedsim.tools.deployment.data_ledger import affords_anything, count_affordable

STEP = PoissonSampled(0.1, Gaussian(1.0))
OTHER = PoissonSampled(0.1, Gaussian(1.1))


def fit(spent: dict[Event, int], *wanted: tuple[Event, int]) -> int:
    return count_affordable(spent, wanted, epsilon=4.0, delta=1e-5)


def test_a_first_run_gets_nearly_what_the_tightest_accountant_affords() -> None:
    alone = fit({}, (STEP, 10**6))
    assert alone == PrivacyFilter(4.0, 0.5e-5).max_count(STEP)
    assert 20 < alone <= PrivacyFilter(4.0, 1e-5).max_count(STEP)
    assert fit({STEP: 20}, (STEP, 10**6)) == alone - 20
    assert fit({STEP: alone}, (STEP, 1)) == 0


def test_a_second_event_ends_the_rule_of_one_event() -> None:
    assert 5 < fit({OTHER: 1}, (STEP, 10**6)) < 15
    assert fit({OTHER: 1, STEP: 15}, (STEP, 1)) == 0
    assert fit({}, (STEP, 20), (OTHER, 1)) < 21
    assert fit({}, (STEP, 5), (OTHER, 2)) == 7


@pytest.mark.parametrize("draw", range(6))
def test_no_sequence_of_requests_spends_more_than_the_target(draw: int) -> None:
    """A server that takes all it can get of one event after the other: ε by PLD stays below."""
    generator = np.random.default_rng(draw)
    spent: Counter[Event] = Counter()
    total = PrivacyLedger()
    for _ in range(8):
        rate = float(generator.choice([0.01, 0.1, 0.5, 1.0]))
        event = PoissonSampled(rate, Gaussian(float(generator.uniform(0.6, 8.0))))
        count = fit(spent, (event, int(generator.integers(1, 200))))
        if count:
            spent[event] += count
            total.record(event, count)
    assert 0.0 < total.epsilon(1e-5) <= 4.0


def test_what_has_no_guarantee_affords_nothing() -> None:
    assert fit({}, (Gaussian(0.0), 1)) == 0
    assert fit({}, (NonPrivate(), 1)) == 0
    assert fit({NonPrivate(): 1}, (Gaussian(100.0), 1)) == 0
    with pytest.raises(UnsupportedEventError):
        fit({}, (EpsilonDelta(0.1, 1e-9), 1))
    with pytest.raises(UnsupportedEventError):
        fit({}, (FixedSizeSampled(100, 10, Gaussian(4.0)), 1))


def test_nothing_wanted_is_nothing_refused() -> None:
    """A round within an epoch that was charged before has no events of its own."""
    assert fit({NonPrivate(): 1}) == 0


def test_a_budget_for_nothing_is_known() -> None:
    assert affords_anything(0.1, 1e-6)
    assert not affords_anything(1e-9, 1e-300)

"""What every accountant promises, whichever mathematics it uses."""

import math
import random
from typing import Any

import numpy as np
import pytest

from fedsim.accountant import (
    Accountant,
    Composed,
    Event,
    Gaussian,
    NonPrivate,
    PldAccountant,
    PoissonSampled,
    PrivacySpent,
    RdpAccountant,
    SelfComposed,
    UnsupportedEventError,
    make_accountant,
)
from fedsim.accountant.rdp import DEFAULT_ORDERS

STEP = PoissonSampled(0.1, Gaussian(1.3))


@pytest.fixture(params=["pld", "rdp"])
def accountant(request: pytest.FixtureRequest) -> Accountant:
    return make_accountant(request.param)


def test_nothing_composed_costs_nothing(accountant: Accountant) -> None:
    assert accountant.get_epsilon(1e-5) == 0.0
    assert accountant.get_delta(0.0) == 0.0
    assert accountant.get_privacy_spent(1e-5) == PrivacySpent(0.0, 1e-5, None)
    accountant.compose(STEP, 0).compose(PoissonSampled(0.0, Gaussian(1.0)), 10)
    accountant.compose(Composed(())).compose(SelfComposed(NonPrivate(), 0))
    assert accountant.get_epsilon(1e-5) == 0.0


@pytest.mark.parametrize(
    "event",
    [NonPrivate(), Gaussian(0), PoissonSampled(0.5, Gaussian(0)), SelfComposed(NonPrivate(), 2)],
)
def test_a_release_without_noise_is_infinite(accountant: Accountant, event: Event) -> None:
    accountant.compose(STEP).compose(event).compose(STEP)
    assert accountant.get_epsilon(1e-5) == math.inf
    assert accountant.get_delta(1e6) == 1.0
    assert accountant.get_privacy_spent(0.5).best_order is None


def test_compose_returns_the_accountant_and_keeps_history_run_length(
    accountant: Accountant,
) -> None:
    assert accountant.compose(STEP) is accountant
    accountant.compose(STEP, 4).compose(Gaussian(2.0)).compose(STEP).compose(STEP, 0)
    assert accountant.history == ((STEP, 5), (Gaussian(2.0), 1), (STEP, 1))


def test_only_the_counts_matter(accountant: Accountant) -> None:
    other = PoissonSampled(0.02, Gaussian(0.9))
    events: list[Event] = [*[STEP] * 6, *[Gaussian(5.0)] * 2, *[other] * 3]
    random.Random(0).shuffle(events)
    for event in events:
        accountant.compose(event)
    whole = type(accountant)().compose(
        Composed((SelfComposed(STEP, 6), PoissonSampled(1.0, Gaussian(5)))),
    )
    whole.compose(Gaussian(float(np.float32(5.0)))).compose(other, 3)
    assert whole.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    assert whole.steps == accountant.steps


def test_unsupported_events_are_named_and_change_nothing(accountant: Accountant) -> None:
    accountant.compose(STEP, 3)
    before = (accountant.history, accountant.steps, accountant.get_epsilon(1e-5))
    bad = Composed((STEP, PoissonSampled(0.5, PoissonSampled(0.125, Gaussian(1.0)))))
    with pytest.raises(UnsupportedEventError, match=r"0\.125"):
        accountant.compose(bad)
    with pytest.raises(UnsupportedEventError):
        accountant.compose(bad, 0)
    with pytest.raises(ValueError, match="count must be a whole number"):
        accountant.compose(STEP, -1)
    assert before == (accountant.history, accountant.steps, accountant.get_epsilon(1e-5))


def test_answers_follow_what_is_composed_afterwards(accountant: Accountant) -> None:
    first = accountant.compose(STEP, 10).get_epsilon(1e-5)
    assert accountant.get_epsilon(1e-5) == first
    assert accountant.get_epsilon(1e-6) > first
    assert accountant.compose(STEP, 10).get_epsilon(1e-5) > first


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-9, 2.0, math.nan])
def test_delta_must_be_a_probability_in_between(accountant: Accountant, delta: float) -> None:
    with pytest.raises(ValueError, match="delta must"):
        accountant.get_epsilon(delta)
    with pytest.raises(ValueError, match="delta must"):
        accountant.compose(STEP).get_privacy_spent(delta)


@pytest.mark.parametrize("epsilon", [-1e-9, math.inf, math.nan])
def test_epsilon_must_be_finite_and_not_negative(accountant: Accountant, epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must"):
        accountant.get_delta(epsilon)


def test_best_order_belongs_to_rdp() -> None:
    spent = RdpAccountant().compose(STEP, 100).get_privacy_spent(1e-5)
    assert spent.best_order in DEFAULT_ORDERS
    assert spent.delta == 1e-5
    assert PldAccountant().compose(STEP, 100).get_privacy_spent(1e-5).best_order is None


def test_exact_is_below_pld_is_below_rdp() -> None:
    # 6.1877 is the exact epsilon (an inversion of the Laplace transform; see test_pld.py).
    event = PoissonSampled(0.01, Gaussian(1.0))
    pld = PldAccountant().compose(event, 10_000).get_epsilon(1e-5)
    rdp = RdpAccountant().compose(event, 10_000).get_epsilon(1e-5)
    assert 6.1877 <= pld <= 6.1877 + 2e-4
    assert rdp == pytest.approx(6.717, abs=1e-3)


def test_more_orders_only_help() -> None:
    few = RdpAccountant(orders=(2, 8, 32)).compose(STEP, 50)
    assert few.get_epsilon(1e-5) >= RdpAccountant().compose(STEP, 50).get_epsilon(1e-5)
    with pytest.raises(ValueError, match="orders must lie in"):
        RdpAccountant(orders=(1.0,))


def test_unknown_accountants_are_refused() -> None:
    unknown: Any = "gdp"
    with pytest.raises(ValueError, match=r"must be one of \['pld', 'rdp'\], got 'gdp'"):
        make_accountant(unknown)


def test_the_docstrings_say_what_the_sensitivity_is() -> None:
    text = " ".join((Accountant.__doc__ or "").split())
    assert "zero-out and under add-remove adjacency" in text
    assert "sensitivity C" in text
    assert "2 C: not covered" in text

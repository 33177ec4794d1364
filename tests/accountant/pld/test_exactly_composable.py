"""Few (epsilon, delta) guarantees: every outcome of their randomised responses, at 60 digits."""

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import EpsilonDelta, FleetAccountant, Gaussian, make_accountant
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.composition import Approximate, SampledGaussian
from fedsim.accountant.pld.privacy_profile import (
    composed_delta,
    composed_epsilon,
    exactly_composable,
)
from fedsim.accountant.textbook.classical import (
    basic_composition,
    kov_composition,
    optimal_composition,
)

Kinds = Sequence[tuple[Approximate, int]]
kinds_ = st.lists(
    st.tuples(
        st.builds(
            Approximate,
            st.sampled_from([1e-6, 0.01, 0.3, 1.0, 2.5, 30.0, 800.0]).map(lambda x: 1.037 * x),
            st.sampled_from([0.0, 1e-12, 1e-7]),
        ),
        st.sampled_from([1, 2, 5, 30]),
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda step: step[0],
)


def exact_delta(kinds: Kinds, epsilon: float) -> Any:
    """Murtagh, Vadhan 2016, Theorem 1.5, over all numbers of flips."""
    outcomes, kept = [(mpmath.mpf(0), mpmath.mpf(1))], mpmath.mpf(1)
    for kind, n in kinds:
        one = mpmath.mpf(kind.epsilon)
        kept *= (1 - mpmath.mpf(kind.delta)) ** n
        outcomes = [
            (
                loss + (n - 2 * f) * one,
                p * mpmath.binomial(n, f) * mpmath.e ** ((n - f) * one) / (1 + mpmath.e**one) ** n,
            )
            for loss, p in outcomes
            for f in range(n + 1)
        ]
    return 1 - kept * (
        1 - sum(p * (1 - mpmath.e ** (epsilon - loss)) for loss, p in outcomes if loss > epsilon)
    )


@settings(max_examples=15, deadline=None)
@given(kinds_, st.sampled_from([0.3, 1e-3, 1e-5, 1e-9]), st.floats(0.0, 1.0))
def test_guarantee_the_composition_is_exact_and_never_below(
    given_kinds: Kinds, delta: float, share: float
) -> None:
    kinds = exactly_composable(given_kinds)
    assert kinds is not None
    total = sum(n * kind.epsilon for kind, n in kinds)
    with mpmath.workdps(60):
        epsilon = composed_epsilon(kinds, delta)
        if epsilon < math.inf:
            assert exact_delta(kinds, epsilon) <= delta * (1 + 1e-13)
            assert epsilon <= total * (1 + 1e-14)
            assert epsilon == 0.0 or exact_delta(kinds, epsilon * (1 - 1e-9)) >= delta * (1 - 1e-5)
        at = share * min(total, 100.0)
        truth, found = exact_delta(kinds, at), composed_delta(kinds, at)
        slack = 1e-300 + 2e-15 * total  # of losses that are rounded up
        assert truth * (1 - mpmath.mpf("1e-13")) <= found <= truth * (1 + 1e-9) + slack


def test_a_sum_of_losses_that_is_rounded_down_has_its_delta() -> None:
    kinds = exactly_composable([(Approximate(1.037 * 1e-6, 0.0), 5)])
    assert kinds is not None
    total = 5 * (1.037 * 1e-6)
    with mpmath.workdps(60):
        assert 0 < exact_delta(kinds, total) <= composed_delta(kinds, total) <= 1e-20


@pytest.mark.parametrize(
    ("epsilon", "delta", "count"),
    [(1.0, 1e-6, 2), (0.5, 1e-7, 4), (0.3, 0.0, 30), (0.1, 1e-8, 500)],
)
@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_equal_guarantees_are_the_optimal_composition(
    name: AccountantName, epsilon: float, delta: float, count: int
) -> None:
    """Kairouz, Oh, Viswanath 2015, Theorem 3.3; so none of the looser rules is below."""
    ours = make_accountant(name).compose(EpsilonDelta(epsilon, delta), count)
    best = optimal_composition(epsilon, delta, count, 1e-5)
    assert ours.get_epsilon(1e-5) == pytest.approx(best, rel=1e-10)
    loose, total = kov_composition(epsilon, delta, count, 1e-5)
    assert ours.get_epsilon(total) <= loose
    loose, total = basic_composition([epsilon] * count, [delta] * count)
    assert ours.get_epsilon(total + 1e-12) <= loose * (1 + 1e-14)
    fleet = FleetAccountant(name).compose("a", EpsilonDelta(epsilon, delta), count)
    assert fleet.get_epsilon(1e-5)["a"] == ours.get_epsilon(1e-5)
    assert ours.get_privacy_spent(1e-5).best_order is None


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_two_guarantees_cost_at_most_their_sum(name: AccountantName) -> None:
    """Rényi's bound alone is above the sum: 2.505 at the delta of basic composition."""
    ours = make_accountant(name).compose(EpsilonDelta(0.5, 1e-6)).compose(EpsilonDelta(2.0, 4e-6))
    assert 2.49 < ours.get_epsilon(5e-6) <= 2.5 * (1 + 1e-14)
    assert ours.get_delta(2.5) <= 5e-6
    assert ours.compose(Gaussian(50.0)).get_epsilon(5e-5) > 2.5


def test_other_mechanisms_and_many_guarantees_are_left_to_the_accountants() -> None:
    known = Approximate(1.0, 0.0)
    assert exactly_composable({}.items()) is None
    assert exactly_composable([(known, 1), (SampledGaussian(0.1, 1.0), 1)]) is None
    assert exactly_composable([(known, 200), (Approximate(2.0, 0.0), 200)]) is None
    assert exactly_composable([(Approximate(0.0, 1e-9), 10**9), (known, 3)]) is not None
    rising = [
        make_accountant("rdp").compose(EpsilonDelta(0.01, 0.0), count).get_epsilon(1e-5)
        for count in (16_000, 16_383, 16_384, 20_000)
    ]
    assert np.all(np.diff(rising) > 0), "past the limit the looser bound takes over"


@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_one_guarantee_is_itself_at_its_own_delta(name: AccountantName) -> None:
    one = make_accountant(name).compose(EpsilonDelta(3.437, 1e-4))
    assert one.get_epsilon(1e-4) == 3.437
    assert one.get_epsilon(1e-4 * (1 - 1e-9)) == math.inf
    assert one.compose(EpsilonDelta(0.0, 1e-4)).get_epsilon(1e-4) == math.inf

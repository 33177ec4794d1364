"""The analytic Gaussian mechanism against 60-digit arithmetic and dp-accounting."""

import math
import random
from typing import Any

import mpmath as mp
import pytest
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.pld.privacy_profile import gaussian_epsilon, gaussian_log_delta


def exact_log_delta(mu: float, epsilon: float) -> Any:
    with mp.workdps(100):
        m, e = mp.mpf(mu), mp.mpf(epsilon)

        def cdf(x: Any) -> Any:
            return mp.erfc(-x / mp.sqrt(2)) / 2

        return mp.log(cdf(m / 2 - e / m) - mp.exp(e) * cdf(-m / 2 - e / m))


@pytest.mark.parametrize("mu", [1e-30, 1e-15, 1e-8, 1e-4, 0.02, 0.5, 0.9999, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0, 3.0])
def test_log_delta_is_exact(mu: float, share: float) -> None:
    epsilon = share * (mu * mu / 2 + 5 * mu)
    exact = float(exact_log_delta(mu, epsilon))
    assert gaussian_log_delta(mu, epsilon) == pytest.approx(exact, rel=1e-13, abs=1e-12)


@pytest.mark.parametrize("exponent", [-30.0, -14.0, -9.0, -8.0, -4.0, -0.001, 0.001, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("share", [0.1, 1e-3, 1e-12])
def test_guarantee_epsilon_is_never_below_the_truth(exponent: float, share: float) -> None:
    """At mu = 1e-8 delta was 3e-7 too large at the epsilon returned; at 1e-15 there was none."""
    mu = 10.0**exponent
    delta = share * min(mu, 1.0)
    epsilon = gaussian_epsilon(mu, delta)
    assert epsilon > 0.0
    excess = math.log(delta) - exact_log_delta(mu, epsilon)
    assert 0.0 <= excess <= 1e-11 * max(1.0, mu)


def test_guarantee_random_epsilons_are_nowhere_below_100_digits() -> None:
    draw = random.Random(7)
    for _ in range(100):
        mu = 10.0 ** draw.uniform(-12, 4)
        delta = min(mu, 1.0) * 10.0 ** draw.uniform(-60, -0.5)
        excess = math.log(delta) - exact_log_delta(mu, gaussian_epsilon(mu, delta))
        assert 0.0 <= excess <= 1e-10 * max(1.0, mu), (mu, delta)


def test_below_all_normal_numbers_more_is_assumed() -> None:
    assert 0.0 < gaussian_epsilon(1e-300, 1e-301) <= 1e-289
    assert gaussian_epsilon(1e-300, 1e-15) == 0.0


def test_log_delta_goes_on_where_delta_underflows() -> None:
    assert gaussian_log_delta(1.0, 60.0) == pytest.approx(float(exact_log_delta(1.0, 60.0)))
    assert gaussian_log_delta(1.0, 60.0) < math.log(5e-324)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_epsilon_equals_dp_accounting(mu: float, delta: float) -> None:
    assert gaussian_epsilon(mu, delta) == pytest.approx(
        get_epsilon_gaussian(1 / mu, delta, tol=1e-13), rel=1e-9, abs=1e-9
    )


@given(
    mu=st.floats(1e-3, 1e3),
    delta=st.floats(-200.0, -0.01).map(lambda exponent: 10.0**exponent),
)
@settings(max_examples=50, deadline=None)
def test_guarantee_epsilon_meets_delta_and_is_the_least(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_log_delta(mu, epsilon) <= math.log(delta) + 1e-9
    if epsilon > 0:
        assert gaussian_log_delta(mu, epsilon * (1 - 1e-9)) > math.log(delta) - 1e-9


def test_ends() -> None:
    assert gaussian_epsilon(1e-6, 0.5) == 0.0
    assert gaussian_epsilon(1e9, 0.5) == math.inf


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="mu must be finite and > 0"):
        gaussian_epsilon(0.0, 1e-5)
    with pytest.raises(ValueError, match="delta must"):
        gaussian_epsilon(1.0, 0.0)
    with pytest.raises(ValueError, match="epsilon must"):
        gaussian_log_delta(1.0, -1.0)

"""The moments accountant as published, against mpmath, published numbers and the RDP accountant."""

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.poisson import rdp_sampled_gaussian
from fedsim.accountant.textbook.moments import (
    MOMENTS_ORDERS,
    approx_log_moment,
    interpolated_log_moments,
    log_moments,
    moments_delta,
    moments_epsilon,
)

DELTA = 1e-5


def binomial(q: float, z: float, moment: int) -> float:
    """log E_mu0[r^(moment + 1)], the sum of Mironov, Talwar, Zhang 2019, 50 digits."""
    with mp.workdps(50):
        q, z, a = mp.mpf(q), mp.mpf(z), moment + 1
        terms = (
            mp.binomial(a, k) * (1 - q) ** (a - k) * q**k * mp.exp((k * k - k) / (2 * z * z))
            for k in range(a + 1)
        )
        return float(mp.log(mp.fsum(terms)))


@pytest.mark.parametrize(("q", "z"), [(0.01, 4.0), (0.01, 1.0), (0.3, 0.6), (1e-5, 50.0)])
def test_log_moments_equal_the_published_sum(q: float, z: float) -> None:
    expected = [binomial(q, z, moment) for moment in range(1, 32)]
    assert log_moments(q, z) == pytest.approx(expected, rel=1e-9)


def test_the_defaults_are_moments_1_to_31() -> None:
    assert tuple(range(2, 33)) == MOMENTS_ORDERS  # range(2, 32) would stop at 31


def test_published_epsilon() -> None:
    """Abadi et al. 2016, section 5.2: q = .01, z = 4, E = 100 epochs: (1.26, 1e-5)-DP."""
    total = 10_000 * log_moments(0.01, 4.0)
    epsilon, order = moments_epsilon(MOMENTS_ORDERS, total, DELTA)
    assert epsilon == pytest.approx(1.26, abs=5e-3)
    assert order == 20.0
    assert moments_delta(MOMENTS_ORDERS, total, epsilon)[0] == pytest.approx(DELTA, rel=1e-12)


def test_the_literal_article_would_under_report() -> None:
    """log A_a taken for the moment a instead of a - 1: 5.60, below the exact 6.19."""
    total = 10_000 * log_moments(0.01, 1.0)
    right = moments_epsilon(MOMENTS_ORDERS, total, DELTA)[0]
    assert right == pytest.approx(7.47, abs=5e-3)
    wrong = np.min((total - math.log(DELTA)) / np.array(MOMENTS_ORDERS))
    assert wrong == pytest.approx(5.60, abs=5e-3)
    better = epsilon_from_rdp(MOMENTS_ORDERS, total / (np.array(MOMENTS_ORDERS) - 1), DELTA)[0]
    assert 6.19 < better < right


def test_parentheses_of_the_conversion() -> None:
    """rho + log(1/delta)/(order - 1), not rho + log(1/delta)/order - 1."""
    total = 10_000 * log_moments(0.01, 1.0)
    orders = np.array(MOMENTS_ORDERS)
    wrong = np.min(total / (orders - 1) - math.log(DELTA) / orders - 1)
    assert moments_epsilon(MOMENTS_ORDERS, total, DELTA)[0] > wrong + 1.0


@given(q=st.floats(1e-4, 0.5), z=st.floats(0.5, 20.0), order=st.floats(1.05, 40.0))
@settings(max_examples=60, deadline=None)
def test_interpolation_is_never_below_the_exact_moment(q: float, z: float, order: float) -> None:
    exact = (order - 1.0) * rdp_sampled_gaussian(q, z, (order,))[0]
    (chord,) = interpolated_log_moments(q, z, (order,))
    assert chord >= exact * (1 - 1e-9)


def test_interpolation_touches_at_whole_orders_and_is_loose_between() -> None:
    orders = (2.0, 7.0, 31.0)
    assert np.array_equal(
        interpolated_log_moments(0.01, 1.0, orders), log_moments(0.01, 1.0, orders)
    )
    (chord,) = interpolated_log_moments(0.01, 1.0, (1.5,))
    (moment,) = log_moments(0.01, 1.0, (2,))
    assert chord == 0.5 * moment
    exact = 0.5 * rdp_sampled_gaussian(0.01, 1.0, (1.5,))[0]
    assert chord / exact == pytest.approx(1.35, abs=0.01)
    assert np.all(np.isinf(interpolated_log_moments(0.1, 0.0, (1.5, 2.0, 2.5))))


def test_interpolated_moments_stay_epsilon_bounds() -> None:
    orders = (2.5, 8.5, 16.5)
    steps = 1000
    chord = moments_epsilon(orders, steps * interpolated_log_moments(0.02, 1.5, orders), DELTA)[0]
    curve = steps * (np.array(orders) - 1) * rdp_sampled_gaussian(0.02, 1.5, orders)
    assert chord >= moments_epsilon(orders, curve, DELTA)[0]


@pytest.mark.parametrize(("z", "moment", "ratio"), [(4.0, 10, 1.95), (1.0, 4, 1.08)])
def test_the_approximation_is_its_formula(z: float, moment: int, ratio: float) -> None:
    approximate = approx_log_moment(0.01, z, moment)
    assert approximate == pytest.approx(1e-4 * moment * (moment + 1) / (0.99 * z * z), rel=1e-14)
    assert approximate / binomial(0.01, z, moment) == pytest.approx(ratio, abs=5e-3)


@pytest.mark.parametrize(("moment", "ratio"), [(8, 0.51), (31, 2.9e-4)])
def test_where_the_approximation_is_too_low_it_is_refused(moment: int, ratio: float) -> None:
    formula = 1e-4 * moment * (moment + 1) / 0.99
    assert formula / binomial(0.01, 1.0, moment) == pytest.approx(ratio, rel=0.01)
    with pytest.raises(ValueError, match=rf"moment must be between 1 and .* got {moment}"):
        approx_log_moment(0.01, 1.0, moment)


@given(q=st.floats(1e-5, 0.2), z=st.floats(0.6, 10.0), steps=st.integers(1, 10**5))
@settings(max_examples=40, deadline=None)
def test_never_below_the_better_conversion_and_monotone(q: float, z: float, steps: int) -> None:
    total = steps * log_moments(q, z)
    epsilon = moments_epsilon(MOMENTS_ORDERS, total, DELTA)[0]
    rdp = total / (np.array(MOMENTS_ORDERS) - 1)
    assert epsilon >= epsilon_from_rdp(MOMENTS_ORDERS, rdp, DELTA)[0]
    assert moments_epsilon(MOMENTS_ORDERS, 2 * total, DELTA)[0] >= epsilon
    assert moments_epsilon(MOMENTS_ORDERS, total, DELTA / 10)[0] >= epsilon
    assert moments_delta(MOMENTS_ORDERS, total, epsilon)[0] <= DELTA * (1 + 1e-9)


def test_edges() -> None:
    infinite = log_moments(0.1, 0.0)
    assert moments_epsilon(MOMENTS_ORDERS, infinite, DELTA)[0] == math.inf
    assert moments_delta(MOMENTS_ORDERS, infinite, 1.0)[0] == 1.0
    assert np.all(log_moments(0.0, 1.0) == 0.0)
    assert moments_delta((2.0,), np.array([5.0]), 1.0)[0] == 1.0


BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (log_moments, (0.1, 1.0, (2.0, 2.5)), r"orders must be whole numbers >= 2, got 2\.5"),
    (log_moments, (0.1, 1.0, ()), "orders must not be empty"),
    (log_moments, (1.1, 1.0), r"sampling_rate must .* got 1\.1"),
    (log_moments, (0.1, -1.0), r"noise_multiplier must .* got -1\.0"),
    (interpolated_log_moments, (0.1, 1.0, (1.0,)), r"orders must lie in \(1, .* got 1\.0"),
    (moments_epsilon, ((2.0,), np.array([1.0]), 0.0), r"delta must .* got 0\.0"),
    (moments_epsilon, ((2.0, 3.0), np.array([1.0]), 0.1), r"same shape, got \(2,\) and \(1,\)"),
    (moments_epsilon, ((2.0,), np.array([-1.0]), 0.1), r"moments must be >= 0, got -1\.0"),
    (moments_epsilon, ((2.0,), np.array([math.nan]), 0.1), "moments must be >= 0, got nan"),
    (moments_delta, ((2.0,), np.array([1.0]), -1.0), r"epsilon must .* got -1\.0"),
    (approx_log_moment, (0.01, 0.9, 1), r"noise_multiplier must be >= 1 here, got 0\.9"),
    (approx_log_moment, (0.07, 1.0, 1), r"sampling_rate must be < 1/\(16 z\) = 0\.0625 .* 0\.07"),
    (approx_log_moment, (0.01, 1.0, 5), r"moment must be between 1 and .* = 4\.605.*, got 5"),
    (approx_log_moment, (0.01, 1.0, 0), "moment must be between 1 and .* got 0"),
    (approx_log_moment, (0.01, 1.0, 1.5), r"moment must be a whole number >= 0, got 1\.5"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)

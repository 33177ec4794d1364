"""Rényi divergence of two Gaussians and the two worked examples."""

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp.without_replacement import (
    rdp_without_replacement,
    rdp_without_replacement_lower_bound,
)
from fedsim.accountant.textbook.renyi import bad_case_rdp_clt, good_case_rdp_clt, renyi_gaussians


def closed_form(order: float, mean_p: float, std_p: float, mean_q: float, std_q: float) -> float:
    """The formula of Gil et al. 2013, 60 digits."""
    with mp.workdps(60):
        a, m, s, n, t = (mp.mpf(v) for v in (order, mean_p, std_p, mean_q, std_q))
        spread = (1 - a) * s**2 + a * t**2
        last = mp.log(mp.sqrt(spread) / (s ** (1 - a) * t**a)) / (1 - a)
        return float(a * (m - n) ** 2 / (2 * spread) + last)


def quadrature(order: float, mean_p: float, std_p: float, mean_q: float, std_q: float) -> float:
    """log E_Q[(P/Q)^a] / (a - 1) from its definition."""
    with mp.workdps(30):

        def integrand(x: Any) -> Any:
            p, q = mp.npdf(x, mean_p, std_p), mp.npdf(x, mean_q, std_q)
            return q * (p / q) ** order

        marks = [-60, -20, -8, -4, -2, 0, 2, 4, 8, 20, 60]
        return float(mp.log(mp.quad(integrand, marks)) / (order - 1))


PAIRS = [(0.0, 1.0, 1.0, 2.0), (1.0, 2.0, -0.5, 1.7), (0.0, 1.0, 1.0, 1.0), (0.3, 1.0, 0.3, 1.001)]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("order", [0.25, 1.3, 2.9])
def test_equals_the_definition(order: float, pair: tuple[float, float, float, float]) -> None:
    assert renyi_gaussians(order, *pair) == pytest.approx(quadrature(order, *pair), rel=1e-9)


@given(
    order=st.floats(1e-6, 50.0).filter(lambda a: abs(a - 1) > 1e-12),
    shift=st.floats(-5.0, 5.0),
    log_ratio=st.floats(-3.0, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_full_precision_also_near_the_limits(order: float, shift: float, log_ratio: float) -> None:
    std = math.exp(log_ratio)
    spread = (1 - order) + order * std * std
    if spread < 1e-6 * order:  # at the edge of existence: conditioning, or infinite
        return
    ours, expected = (
        renyi_gaussians(order, shift, 1.0, 0.0, std),
        closed_form(order, shift, 1.0, 0.0, std),
    )
    assert ours == pytest.approx(expected, rel=1e-8, abs=1e-15)


@pytest.mark.parametrize("ratio", [1e-3, 0.9, 0.9999, 1.0, 1.000001, 1.2, 40.0])
def test_order_1_is_kullback_leibler_and_is_continuous(ratio: float) -> None:
    with mp.workdps(50):
        t = mp.mpf(ratio)
        kl = float(mp.log(t) + (1 + mp.mpf("0.49")) / (2 * t**2) - mp.mpf("0.5"))
    assert renyi_gaussians(1.0, 0.7, 1.0, 0.0, ratio) == pytest.approx(kl, rel=1e-12)
    for near in (1 - 1e-9, 1 + 1e-9):
        assert renyi_gaussians(near, 0.7, 1.0, 0.0, ratio) == pytest.approx(
            kl, rel=1e-2 if ratio < 0.01 else 1e-7
        )


def test_the_logarithm_holds_s_not_its_square() -> None:
    """With s^2 the article's example is negative, which no divergence can be."""
    assert renyi_gaussians(2.0, 0.0, 1.0, 1.0, 2.0) == pytest.approx(0.556, abs=5e-4)
    wrong = 2 / (2 * 7) - math.log(7 / 4)
    assert wrong == pytest.approx(-0.417, abs=5e-4)


def test_limits_and_existence() -> None:
    assert renyi_gaussians(0.0, 0.0, 1.0, 5.0, 2.0) == 0.0
    assert renyi_gaussians(1e-9, 0.0, 1.0, 1.0, 2.0) == pytest.approx(
        closed_form(1e-9, 0.0, 1.0, 1.0, 2.0), rel=1e-12
    )
    assert renyi_gaussians(math.inf, 1.0, 1.0, 1.0, 1.0) == 0.0
    assert renyi_gaussians(math.inf, 1.0, 1.0, 0.0, 1.0) == math.inf
    assert renyi_gaussians(math.inf, 0.0, 2.0, 0.0, 1.0) == math.inf
    largest = renyi_gaussians(math.inf, 1.0, 1.0, 0.0, 2.0)
    grid = np.linspace(-10, 10, 200001)
    ratio = math.log(2) - 0.5 * (grid - 1) ** 2 + grid**2 / 8
    assert largest == pytest.approx(float(ratio.max()), rel=1e-8)
    assert renyi_gaussians(1e9, 1.0, 1.0, 0.0, 2.0) == pytest.approx(largest, rel=1e-6)
    # s^2 = (1 - a) 4 + a: 0 at a = 4/3
    assert renyi_gaussians(1.33, 0.0, 2.0, 0.0, 1.0) < math.inf
    assert renyi_gaussians(1.34, 0.0, 2.0, 0.0, 1.0) == math.inf
    assert renyi_gaussians(4.0, 0.0, 1.0, 0.0, 1.0) == 0.0


@given(
    orders=st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 30.0)),
    shift=st.floats(-3.0, 3.0),
    std=st.floats(0.2, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_non_negative_and_monotone_in_the_order(
    orders: tuple[float, float], shift: float, std: float
) -> None:
    low, high = (renyi_gaussians(order, shift, 1.0, 0.0, std) for order in sorted(orders))
    assert 0.0 <= low <= high * (1 + 1e-12) + 1e-15


ORDERS = (1.5, 2.0, 4.0, 16.0, 64.0)


def test_the_bad_case_is_the_mixture_and_finite() -> None:
    exact = rdp_without_replacement_lower_bound(0.1, 10.0, ORDERS)
    assert np.all(np.isfinite(exact))
    assert np.all(exact <= rdp_without_replacement(0.1, 10.0, ORDERS))
    clt = bad_case_rdp_clt(0.1, 10.0, ORDERS)
    assert clt[1] == pytest.approx(exact[1], rel=1e-3)
    assert clt[-1] < 0.97 * exact[-1]  # not an upper bound
    # infinite from order 1 + s^2/(q (1-q)) = 278.8 on, where the mixture is finite
    edge = 1 + 25 / 0.09
    assert bad_case_rdp_clt(0.1, 10.0, (edge - 1, edge + 1))[1] == math.inf
    assert bad_case_rdp_clt(0.1, 10.0, (edge - 1,))[0] < math.inf
    assert np.all(np.isfinite(rdp_without_replacement_lower_bound(0.1, 10.0, (edge + 1,))))


def good_case_exactly(m: int, n: int, s: float, order: float) -> float:
    """The hypergeometric mixture of Gaussians against its mirror image."""
    upper, k = (n + 1) // 2, np.arange(0, m + 1)
    with mp.workdps(25):
        weights = [
            mp.binomial(upper, int(i)) * mp.binomial(n - upper, m - int(i)) / mp.binomial(n, m)
            for i in k
        ]
        centres = [int(i) - mp.mpf(m) / 2 for i in k]  # sum of i halves and m - i minus halves

        def density(x: Any) -> Any:
            return mp.fsum(w * mp.npdf(x, c, s) for w, c in zip(weights, centres, strict=True))

        def integrand(x: Any) -> Any:
            return density(-x) * (density(x) / density(-x)) ** order

        marks = [-30, -10, -5, -2, 0, 2, 5, 10, 30]
        return float(mp.log(mp.quad(integrand, marks)) / (order - 1))


def test_the_good_case_has_the_variance_of_sampling_without_replacement() -> None:
    m, n, s, order = 6, 15, 1.5, 3.0
    exact = good_case_exactly(m, n, s, order)
    (ours,) = good_case_rdp_clt(m, n, 2 * s, (order,))
    assert ours == pytest.approx(exact, rel=2e-3)
    q = m / n
    with_replacement = order * q * q / (2 * (s * s + m * (1 - 1 / n**2) / 4))
    assert abs(with_replacement / exact - 1) > 0.1
    # the published (n - 1/n) instead of (n + 1) differs by the factor 1 - 1/n in the variance
    published = order * q * q / (2 * (s * s + q * (1 - q) * (n - 1 / n) / 4))
    assert abs(published / exact - 1) > 5 * abs(ours / exact - 1)


def test_the_good_case_is_below_the_bad_one() -> None:
    good = good_case_rdp_clt(100, 1001, 10.0, ORDERS)
    assert np.all(good < rdp_without_replacement_lower_bound(100 / 1001, 10.0, ORDERS))


BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (renyi_gaussians, (-0.1, 0.0, 1.0, 0.0, 1.0), r"order must be >= 0, got -0\.1"),
    (renyi_gaussians, (math.nan, 0.0, 1.0, 0.0, 1.0), "order must be a number, got NaN"),
    (renyi_gaussians, (2.0, 0.0, 0.0, 0.0, 1.0), r"std_p must be finite and > 0, got 0\.0"),
    (renyi_gaussians, (2.0, 0.0, 1.0, 0.0, -1.0), r"std_q must be finite and > 0, got -1\.0"),
    (renyi_gaussians, (2.0, math.inf, 1.0, 0.0, 1.0), "mean_p must be finite, got inf"),
    (bad_case_rdp_clt, (0.1, 0.0, ORDERS), r"noise_multiplier must .* got 0\.0"),
    (good_case_rdp_clt, (3, 10, 1.0, ORDERS), "dataset_size must be odd, .* got 10"),
    (good_case_rdp_clt, (12, 11, 1.0, ORDERS), "sample_size must be <= dataset_size = 11, got 12"),
    (good_case_rdp_clt, (1.5, 11, 1.0, ORDERS), r"sample_size must be a whole number .* 1\.5"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)

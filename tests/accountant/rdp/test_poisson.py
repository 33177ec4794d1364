"""RDP of the Poisson-sampled Gaussian against independent computations."""

import math
import random
from typing import Any

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant as OracleAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.rdp.curves import mechanism_rdp
from fedsim.accountant.rdp.poisson import (
    DEFAULT_ORDERS,
    rdp_replaced_gaussian,
    rdp_sampled_gaussian,
)

ORDERS = (1.05, 2.75, 10.75)  # whole orders: against dp-accounting, below
CASES = [
    (0.01, 1.0),
    (0.99, 0.2),
    (1e-5, 50.0),
    (0.01, 0.1),
    (0.999999, 2.0),
]


def whole_order(order: float, rate: float, noise: float) -> Any:
    """RDP at a whole order from the binomial expansion, in the digits of the working precision."""
    whole, q, z = int(order), mp.mpf(rate), mp.mpf(noise)
    terms = (
        mp.binomial(whole, k) * (1 - q) ** (whole - k) * q**k * mp.exp((k * k - k) / (2 * z * z))
        for k in range(whole + 1)
    )
    return mp.log(mp.fsum(terms)) / (order - 1)


def by_trapezoid(order: float, rate: float, noise: float, *, replaced: bool = False) -> Any:
    """RDP from its definition: the trapezoid rule errs by less than 1e-18 here.

    The integrand is analytic within pi z^2 of the real axis, and a Gaussian of width z. The mean is
    that of r^order for r = P/Q under Q: N(0, z^2), or (1-q) N(0) + q N(-1) where an example is
    replaced; E[r] = 1, so what is left out of the integrand integrates to 1.
    """
    a, q, z = mp.mpf(order), mp.mpf(rate), mp.mpf(noise)
    h = min(z / 2, z * z * 0.4)
    low, high = (-1 - 11 * z, 2 * a + 11 * z) if replaced else (-11 * z, a + 11 * z)
    total = mp.mpf(0)
    for k in range(int(low / h), int(high / h) + 1):
        x = k * h
        u = q * mp.expm1((2 * x - 1) / (2 * z * z))  # the ratio to N(0), minus 1
        other = 1 + q * mp.expm1((-2 * x - 1) / (2 * z * z)) if replaced else mp.mpf(1)
        u = (1 + u - other) / other
        total += mp.exp(-x * x / (2 * z * z)) * other * ((1 + u) ** a - 1 - a * u)
    return mp.log1p(total * h / (z * mp.sqrt(2 * mp.pi))) / (a - 1)


@pytest.mark.parametrize(("rate", "noise"), CASES)
def test_equals_the_defining_integral(rate: float, noise: float) -> None:
    ours = rdp_sampled_gaussian(rate, noise, ORDERS)
    with mp.workdps(30):
        for order, value in zip(ORDERS, ours, strict=True):
            assert abs(value / by_trapezoid(order, rate, noise) - 1) < 1e-9


def test_guarantee_random_points_are_nowhere_below_60_digits() -> None:
    """Below means by more than 1e-12 relative, the rounding of the sums."""
    draw = random.Random(20261123)
    for point in range(120):
        rate = 10.0 ** draw.uniform(-6, -0.01)
        noise = 10.0 ** draw.uniform(-0.5, 1.5)
        whole = draw.choice([2, 3, 5, 8, 17, 32, 64, 128])
        order = 1.0 + 10.0 ** draw.uniform(-3, 0.9) if point >= 40 else float(whole)
        with mp.workdps(60):
            exact = (whole_order if point < 40 else by_trapezoid)(order, rate, noise)
            (ours,) = rdp_sampled_gaussian(rate, noise, (order,))
            assert -1e-12 <= ours / exact - 1 <= 1e-9, (rate, noise, order)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.5, 1.0), (1e-5, 50.0)])
def test_replacing_equals_the_defining_integral(rate: float, noise: float) -> None:
    orders = (1.05, 10.75)
    ours = rdp_replaced_gaussian(rate, noise, orders)
    with mp.workdps(30):
        for order, value in zip(orders, ours, strict=True):
            exact = by_trapezoid(order, rate, noise, replaced=True)
            assert abs(value / exact - 1) < 1e-9


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [0.0, 5e-324, 0.3, 1 - 1e-16])
@pytest.mark.parametrize("noise", [1e-300, 0.3, 1e50])
def test_replacing_costs_more_than_removing_and_less_than_without_sampling(
    rate: float, noise: float
) -> None:
    orders = DEFAULT_ORDERS[::6]
    curve = rdp_replaced_gaussian(rate, noise, orders)
    assert np.all(curve >= rdp_sampled_gaussian(rate, noise, orders) * (1 - 1e-9))
    if rate > 0.0:
        assert np.all(curve <= rdp_sampled_gaussian(1.0, noise / 2, orders) * (1 + 1e-12))


def oracle_curve(rate: float, noise: float, orders: tuple[float, ...]) -> np.ndarray:
    accountant = OracleAccountant(orders=list(orders))
    event = dp_accounting.GaussianDpEvent(noise)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event))
    return np.array(accountant._rdp)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.2, 0.7), (0.1, 4.0), (0.7, 2.0)])
def test_integer_orders_equal_dp_accounting(rate: float, noise: float) -> None:
    orders = (2.0, 3.0, 8.0, 31.0, 64.0, 256.0)
    expected = oracle_curve(rate, noise, orders)
    assert rdp_sampled_gaussian(rate, noise, orders) == pytest.approx(expected, rel=1e-9)


def test_dp_accounting_is_only_an_upper_bound_at_fractional_orders() -> None:
    # Version 0.6 adds the terms of an alternating series without their signs: above the truth,
    # here by 35 %, so it cannot serve as an equality oracle. Ours is checked by quadrature.
    (ours,) = rdp_sampled_gaussian(0.01, 10.0, (1.5,))
    (theirs,) = oracle_curve(0.01, 10.0, (1.5,))
    assert ours < theirs
    assert theirs / ours > 1.3


def test_closed_forms_at_the_ends() -> None:
    orders = np.array(DEFAULT_ORDERS)
    assert rdp_sampled_gaussian(1.0, 1.7) == pytest.approx(orders / (2 * 1.7**2), rel=1e-14)
    assert np.all(rdp_sampled_gaussian(0.0, 1.0) == 0.0)
    assert np.all(rdp_sampled_gaussian(0.0, 0.0) == 0.0)
    assert np.all(np.isinf(rdp_sampled_gaussian(0.3, 0.0)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [5e-324, 1e-9, 0.5, 1 - 1e-16])
@pytest.mark.parametrize("noise", [1e-300, 1e-3, 1e4, 1e300])
def test_extreme_arguments_give_bounds_between_0_and_the_unsampled_one(
    rate: float, noise: float
) -> None:
    curve = rdp_sampled_gaussian(rate, noise)
    unsampled = rdp_sampled_gaussian(1.0, noise)
    assert np.all(curve >= 0.0)
    assert np.all(curve <= unsampled * (1 + 1e-12))


@given(rate=st.floats(1e-6, 1.0), noise=st.floats(0.2, 50.0), factor=st.floats(1.0, 3.0))
@settings(max_examples=15, deadline=None)
def test_monotone_in_order_rate_and_noise(rate: float, noise: float, factor: float) -> None:
    curve = rdp_sampled_gaussian(rate, noise)
    by_order = curve[np.argsort(DEFAULT_ORDERS)]
    assert np.all(np.diff(by_order) >= -1e-12 * by_order[:-1])
    more = rdp_sampled_gaussian(min(1.0, rate * factor), noise)
    assert np.all(more >= curve * (1 - 1e-11))
    assert np.all(rdp_sampled_gaussian(rate, noise * factor) <= curve * (1 + 1e-11))


def test_default_orders_cover_what_epsilon_needs() -> None:
    assert min(DEFAULT_ORDERS) == 1.05
    assert set(range(2, 65)) <= set(DEFAULT_ORDERS)
    assert max(DEFAULT_ORDERS) == 1024
    assert len(set(DEFAULT_ORDERS)) == len(DEFAULT_ORDERS)


def test_curves_are_cached_and_cannot_be_changed() -> None:
    curve = mechanism_rdp(SampledGaussian(0.1, 1.0), DEFAULT_ORDERS)
    assert mechanism_rdp(SampledGaussian(np.float64(0.1), 1), DEFAULT_ORDERS) is curve
    with pytest.raises(ValueError, match="read-only"):
        curve[0] = 0.0


@pytest.mark.parametrize("orders", [(), (1.0,), (0.5,), (math.nan,), (math.inf,), (1e6,)])
def test_orders_outside_their_range_are_refused(orders: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="orders must"):
        rdp_sampled_gaussian(0.1, 1.0, orders)

"""Random allocation: the pair's divergences in b dimensions, by brute force and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp import random_allocation as allocation
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian
from fedsim.accountant.rdp.random_allocation import rdp_random_allocation

ORDERS = np.array(DEFAULT_ORDERS)


@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0, 3.0])
def test_two_batches_equal_the_double_integral(noise: float) -> None:
    step = min(noise / 10, noise * noise / 6)
    x = np.arange(-16 * noise - 3, 16 * noise + 3, step)
    weight = np.exp(-0.5 * (x / noise) ** 2) * step / noise / math.sqrt(2 * math.pi)
    ratio = np.exp((x - 0.5) / noise**2)
    mean, joint = 0.5 * (ratio[:, None] + ratio), weight[:, None] * weight
    ours = allocation._log_moments_removed(np.arange(2.0, 4.0), 2, noise)
    for order, value in zip((2, 3), ours, strict=True):
        assert value == pytest.approx(math.log(float((joint * mean**order).sum())), rel=1e-9)
    betas = np.array([beta for beta in (0.05, 0.5, 1.0, 2.0, 5.0) if beta <= 4 * noise])
    ours = allocation._log_moments_added(betas + 1, 2, noise)
    for beta, value in zip(betas, ours, strict=True):
        assert value == pytest.approx(math.log(float((joint * mean**-beta).sum())), rel=1e-9)


LOW_ORDERS = np.array([1.001, 1.05, 1.5, 1.95, 1.9999])


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_orders_below_2_equal_the_double_integral(noise: float) -> None:
    """The chord between orders 1 and 2, valid too, is 33 % higher at order 1.5, or more."""
    step = min(noise / 10, noise * noise / 6)
    x = np.arange(-16 * noise - 3, 16 * noise + 5, step)
    weight = np.exp(-0.5 * (x / noise) ** 2) * step / noise / math.sqrt(2 * math.pi)
    ratio = np.exp((x - 0.5) / noise**2)
    mean, joint = 0.5 * (ratio[:, None] + ratio), weight[:, None] * weight
    added = allocation._log_moments_added(LOW_ORDERS, 2, noise)
    ours = rdp_random_allocation(2, noise, tuple(LOW_ORDERS)) * (LOW_ORDERS - 1)
    (chord,) = rdp_random_allocation(2, noise, (2.0,))
    for order, value, add in zip(LOW_ORDERS, ours, added, strict=True):
        gap = mean**order - 1 - order * (mean - 1)
        exact = math.log1p(float((joint * gap).sum()))
        assert value == pytest.approx(max(exact, add), rel=1e-8)
        assert value <= chord * (order - 1)
    assert chord * 0.5 > 1.33 * math.log1p(float((joint * (mean**1.5 - 1)).sum()))


@pytest.mark.parametrize("noise", [0.2, 1.0, 7.0, 1e4])
def test_orders_below_2_of_one_batch_are_those_of_the_gaussian(noise: float) -> None:
    ours = allocation._log_low_moments(LOW_ORDERS, 1, noise)
    assert ours == pytest.approx(LOW_ORDERS * (LOW_ORDERS - 1) / 2 / noise**2, rel=1e-8)


@pytest.mark.parametrize(("batches", "noise"), [(94, 1.0), (1 << 40, 0.2), (1 << 40, 1e4)])
def test_log_moments_below_order_2_are_convex_and_end_at_order_2(
    batches: int, noise: float
) -> None:
    orders = np.linspace(1.0, 2.0, 41)[1:]
    inner = allocation._log_low_moments(orders[:-1], batches, noise)
    (two,) = allocation._log_moments_removed(np.array([2.0]), batches, noise)
    moments = np.concatenate(([0.0], inner, [two]))
    assert np.all(np.diff(moments, 2) >= -1e-9 * two)
    (near,) = allocation._log_low_moments(np.array([2.0 - 1e-9]), batches, noise)
    assert near == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize(("batches", "noise"), [(3, 1.0), (100, 0.5), (1000, 5.0), (10**6, 2.0)])
def test_order_2_has_a_closed_form(batches: int, noise: float) -> None:
    (ours,) = rdp_random_allocation(batches, noise, (2.0,))
    expected = math.log1p(math.expm1(noise**-2) / batches)
    assert ours == pytest.approx(expected, rel=1e-10)


def test_order_3_has_a_closed_form() -> None:
    b, w = 7, math.exp(0.8**-2)  # E[r^2] = w, E[r^3] = w^3
    expected = math.log((b * w**3 + 3 * b * (b - 1) * w + b * (b - 1) * (b - 2)) / b**3) / 2
    assert rdp_random_allocation(7, 0.8, (3.0,))[0] == pytest.approx(expected, rel=1e-12)


def test_one_batch_is_the_gaussian_in_both_orders_of_the_pair() -> None:
    assert rdp_random_allocation(1, 1.5) == pytest.approx(ORDERS / (2 * 1.5**2), rel=1e-14)
    orders = np.array([1.05, 2.0, 3.5])
    ours = allocation._log_moments_added(orders, 1, 1.5)
    assert ours == pytest.approx(orders * (orders - 1) / (2 * 1.5**2), rel=1e-9)


@given(
    batches=st.integers(2, 2000),
    noise=st.floats(0.25, 20.0),
    factor=st.floats(1.0, 3.0),
)
@settings(max_examples=3, deadline=None)
def test_never_above_no_amplification_and_monotone(
    batches: int, noise: float, factor: float
) -> None:
    curve = rdp_random_allocation(batches, noise)
    assert np.all(curve <= ORDERS / (2 * noise**2) * (1 + 1e-12))
    assert np.all(curve >= 0.0)
    assert np.all(rdp_random_allocation(batches, noise * factor) <= curve * (1 + 1e-9))
    # More batches hide more: r is then a mean of more, which is smaller in convex order.
    assert np.all(rdp_random_allocation(batches + 1, noise) <= curve * (1 + 1e-9))


def test_many_batches_at_much_noise_tend_to_poisson_sampling() -> None:
    sampled = 1000 * rdp_sampled_gaussian(1e-3, 5.0, (2.0, 8.0))
    assert rdp_random_allocation(1000, 5.0, (2.0, 8.0)) == pytest.approx(sampled, rel=1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("batches", "noise"),
    [
        *((2, noise) for noise in (0.0, 1e-200, 0.19, 0.2, 1e5, 1e300)),
        *((batches, 1.0) for batches in (1, 10**3, 10**18)),
        *((10**18, noise) for noise in (0.2, 1e300)),
    ],
)
def test_extreme_arguments_give_bounds_without_warnings(batches: int, noise: float) -> None:
    curve = rdp_random_allocation(batches, noise, (1.05, 2.0, 7.5, 32.0, 1024.0))
    assert np.all(curve >= 0.0)
    assert not np.isnan(curve).any()
    if (batches, noise) == (10**18, 1.0):
        assert curve[1] < 1e-3 * 2 / (2 * noise**2)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batches must be a whole number >= 1, got 0"):
        rdp_random_allocation(0, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        rdp_random_allocation(2, -1.0)
    with pytest.raises(ValueError, match="orders must lie in"):
        rdp_random_allocation(2, 1.0, (1.0,))

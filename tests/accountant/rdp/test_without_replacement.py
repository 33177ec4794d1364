"""RDP of sampling without replacement: each bound against an independent computation."""

import math
from typing import Any

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant as OracleAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian
from fedsim.accountant.rdp.without_replacement import (
    WOR_ORDERS,
    rdp_without_replacement,
    rdp_without_replacement_lower_bound,
    rdp_without_replacement_published,
    rdp_without_replacement_tightened,
)

ALL = (
    rdp_without_replacement_lower_bound,
    rdp_without_replacement,
    rdp_without_replacement_tightened,
    rdp_without_replacement_published,
)


def oracle(sampled: int, total: int, z_r: float, orders: tuple[float, ...]) -> np.ndarray:
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = OracleAccountant(orders=list(orders), neighboring_relation=relation)
    event = dp_accounting.GaussianDpEvent(z_r)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(total, sampled, event))
    return np.array(accountant._rdp)


@pytest.mark.parametrize(
    ("q", "z"), [((10, 1000), 2.0), ((100, 1000), 1.0), ((300, 1000), 4.0), ((1, 1000), 20.0)]
)
def test_tightened_equals_dp_accounting_at_half_the_noise(q: tuple[int, int], z: float) -> None:
    orders = (2.0, 2.5, 3.0, 8.0, 31.0, 64.0, 256.0)
    expected = oracle(*q, z / 2, orders)
    assert rdp_without_replacement_tightened(q[0] / q[1], z, orders) == pytest.approx(
        expected, rel=1e-9
    )


def published(q: float, z: float, order: int, *, tightened: bool) -> float:
    """Theorems 9 and 27 as printed, with the alternating sums at 300 digits."""
    with mp.workdps(300):
        q, inverse = mp.mpf(q), 2 / mp.mpf(z) ** 2  # 1 / (2 z_r^2)

        def base(k: int) -> Any:
            return mp.fsum(
                (-1) ** (k - i) * mp.binomial(k, i) * mp.exp(i * (i - 1) * inverse)
                for i in range(k + 1)
            )

        total = mp.mpf(1)
        for j in range(2, order + 1):
            factor = 2 * mp.exp(j * (j - 1) * inverse)
            if j == 2:
                factor = min(4 * mp.expm1(2 * inverse), factor)
            elif tightened:
                pair = abs(base(2 * (j // 2))) * abs(base(2 * ((j + 1) // 2)))
                factor = min(factor, 4 * mp.sqrt(pair))
            total += q**j * mp.binomial(order, j) * factor
        return float(mp.log(total) / (order - 1))


@pytest.mark.parametrize(("q", "z"), [(0.01, 2.0), (0.1, 10.0), (0.05, 100.0), (0.7, 0.8)])
@pytest.mark.parametrize("order", [2, 3, 4, 9, 24])
def test_published_and_tightened_equal_their_theorems(q: float, z: float, order: int) -> None:
    for function, tightened in (
        (rdp_without_replacement_published, False),
        (rdp_without_replacement_tightened, True),
    ):
        expected = published(q, z, order, tightened=tightened)
        assert function(q, z, (order,))[0] == pytest.approx(expected, rel=1e-9)


def test_dp_accountings_alternating_sums_lose_digits_at_large_noise() -> None:
    """Version 0.6 takes forward differences in double precision: here over nine times the theorem.

    How far off depends on the last bits of the machine's exp and log: 9.5 and 10.0 were seen.
    """
    q, z, order = 0.3, 100.0, 96.0
    exact = published(q, z, int(order), tightened=True)
    assert rdp_without_replacement_tightened(q, z, (order,))[0] == pytest.approx(exact, rel=1e-9)
    assert oracle(300, 1000, z / 2, (order,))[0] / exact > 2.0


def direct(order: float, q: float, z: float, digits: int = 20) -> float:
    """1 + a (a-1) int (e^((a-1) x) + e^(-a x)) h(e^x) dx, h in closed form: the first way."""
    with mp.workdps(digits):
        a, q, s = mp.mpf(order), mp.mpf(q), mp.mpf(z) / 2

        def profile(x: Any) -> Any:
            t = 1 + mp.expm1(x) / q
            log_t = mp.log(t)
            near, far = 1 / (2 * s) - log_t * s, -1 / (2 * s) - log_t * s
            return q * (mp.ncdf(near) - t * mp.ncdf(far))

        def integrand(x: Any) -> Any:
            return (mp.exp((a - 1) * x) + mp.exp(-a * x)) * profile(x)

        # Points x > 1/2 of the Gaussians where the likelihood ratio is e^loss.
        places = [s * k for k in (0.5, 1, 2, 4, 7, 12)] + [a + k * s for k in (-6, -3, 0, 3, 6, 12)]
        ends = sorted({mp.log1p(q * mp.expm1(p / s**2)) for p in places if p > 0})
        total = mp.quad(integrand, [mp.mpf(0), *ends])
        return float(mp.log1p(a * (a - 1) * total) / (a - 1))


@pytest.mark.parametrize(
    ("order", "q", "z"),
    [
        (1.05, 0.1, 1.0),
        (2.0, 0.01, 2.0),
        (5.0, 0.9, 0.5),
        (256.0, 0.1, 6.0),
        (1.001, 0.1, 0.1),
    ],
)
def test_the_dominating_bound_equals_the_hockey_stick_integral(
    order: float, q: float, z: float
) -> None:
    assert rdp_without_replacement(q, z, (order,))[0] == pytest.approx(
        direct(order, q, z), rel=1e-9
    )


def hockey_stick(t: float, p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(np.maximum(p - t * q, 0.0)))


def test_the_profile_inequality_behind_it_holds_on_data() -> None:
    """H_t <= h(t) for actual data sets, both orders: all samples of 3 from 7 written out."""
    from itertools import combinations

    s, m, n = 0.8, 3, 7  # s is the noise over the replace-one sensitivity, which is 1 here
    q = m / n
    x = np.arange(-6.0, 7.0, 1e-3)

    def density(values: list[float]) -> np.ndarray:
        sums = [sum(values[i] for i in subset) for subset in combinations(range(n), m)]
        parts = [np.exp(-0.5 * ((x - total) / s) ** 2) for total in sums]
        return np.sum(parts, axis=0) / (len(sums) * s * math.sqrt(2 * math.pi)) * 1e-3

    datasets = [
        ([-0.5] * 6, -0.5, 0.5),
        ([0.5, -0.5, 0.5, -0.5, 0.5, -0.5], -0.5, 0.5),
        ([0.5, 0.1, -0.3, 0.2, 0.0, -0.5], 0.5, -0.2),
    ]
    g0, g1 = (
        np.exp(-0.5 * ((x - c) / s) ** 2) / (s * math.sqrt(2 * math.pi)) * 1e-3 for c in (0, 1)
    )
    orders = (1.5, 2.0, 5.0)
    bound = rdp_without_replacement(q, 2 * s, orders)
    for rest, first, second in datasets:
        p, r = density([*rest, first]), density([*rest, second])
        for t in (1.0, 1.2, 2.0, 5.0):
            limit = hockey_stick(t, (1 - q) * g0 + q * g1, g0)
            assert max(hockey_stick(t, p, r), hockey_stick(t, r, p)) <= limit + 1e-9
        for order, value in zip(orders, bound, strict=True):
            for a, b in ((p, r), (r, p)):
                real = math.log(float(np.sum(b * (a / b) ** order))) / (order - 1)
                assert real <= value


def test_lower_is_the_proposition() -> None:
    """Prop 11 as printed, with e(j) = j / (2 z_r^2), 50 digits."""
    q, z, order = 0.02, 3.0, 12
    with mp.workdps(50):
        g, inverse = mp.mpf(q), 2 / mp.mpf(z) ** 2
        odds = g / (1 - g)
        total = 1 + order * odds
        total += mp.fsum(
            mp.binomial(order, j) * odds**j * mp.exp((j - 1) * j * inverse)
            for j in range(2, order + 1)
        )
        expected = (order * mp.log1p(-g) + mp.log(total)) / (order - 1)
    assert rdp_without_replacement_lower_bound(q, z, (order,))[0] == pytest.approx(
        float(expected), rel=1e-9
    )
    assert rdp_without_replacement_lower_bound(q, z, (order,)) == rdp_sampled_gaussian(
        q, z / 2, (order,)
    )


@given(q=st.floats(1e-5, 0.999), z=st.floats(0.05, 200.0), factor=st.floats(1.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_order_of_the_curves_and_monotony(q: float, z: float, factor: float) -> None:
    orders = (1.25, 2.0, 3.0, 7.0, 8.5, 33.0, 64.0)
    lower, ours, tight, loose = (bound(q, z, orders) for bound in ALL)
    slack = 1 + 1e-10
    assert np.all(lower <= ours * slack)
    assert np.all(ours <= tight * slack)
    assert np.all(tight <= loose * slack)
    assert np.all(ours <= 2 * np.array(orders) / z**2 * slack)  # sampling never hurts
    assert np.all(np.diff(ours) >= -1e-10 * ours[1:])
    assert np.all(rdp_without_replacement(min(1.0, q * factor), z, orders) >= ours / slack)
    assert np.all(rdp_without_replacement(q, z * factor, orders) <= ours * slack)


@pytest.mark.filterwarnings("error")
def test_ends() -> None:
    orders = (1.5, 2.0, 64.0, 300.0)
    for bound in ALL:
        assert bound(1.0, 1.7, orders) == pytest.approx(np.array(orders) * 2 / 1.7**2)  # z/2
        assert np.all(bound(0.0, 1.7, orders) == 0.0)
        assert np.all(np.isinf(bound(0.3, 0.0, orders)))
        assert np.all(bound(0.0, 0.0, orders) == 0.0)
        for z in (1e-200, 1e-3, 0.01, 1e4, 1e8, 1e300):
            for q in (5e-324, 1e-12, 0.5, 1 - 1e-12):
                assert np.all(bound(q, z, orders) >= 0.0)
    near = rdp_without_replacement(1 - 1e-9, 1.7, orders)
    assert near == pytest.approx(np.array(orders) * 2 / 1.7**2, rel=1e-6)


def test_the_reference_table() -> None:
    """T = 1000, q = .01, z_r = 1, delta = 1e-5: z for z_r and Poisson for WOR are large errors."""
    curves = {bound: 1000 * bound(0.01, 2.0, DEFAULT_ORDERS[:-4]) for bound in ALL}
    found = [epsilon_from_rdp(DEFAULT_ORDERS[:-4], curves[bound], 1e-5)[0] for bound in ALL]
    assert found == pytest.approx([2.10, 2.46, 3.58, 3.58], abs=6e-3)
    at_z_1 = 1000 * rdp_without_replacement_tightened(0.01, 1.0, DEFAULT_ORDERS[:-4])
    right = epsilon_from_rdp(DEFAULT_ORDERS[:-4], at_z_1, 1e-5)[0]
    assert right == pytest.approx(20.99, abs=0.05)  # z = 1; 3.58 if z is passed where z/2 belongs


def test_fractional_orders_of_the_published_bounds_are_chords() -> None:
    low, middle, high = rdp_without_replacement_published(0.1, 2.0, (3.0, 3.5, 4.0)) * np.array(
        [2.0, 2.5, 3.0]
    )
    assert middle == pytest.approx((low + high) / 2)
    assert tuple(range(2, 65)) == WOR_ORDERS


@pytest.mark.parametrize("bound", ALL)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 1.0, (2.0,)), r"sampling_rate must be between 0 and 1, got 1\.5"),
        ((math.nan, 1.0, (2.0,)), "sampling_rate must be a number, got NaN"),
        ((0.1, -1.0, (2.0,)), r"noise_multiplier must be finite and >= 0, got -1\.0"),
        ((0.1, 1.0, ()), "orders must not be empty"),
        ((0.1, 1.0, (1.0,)), r"orders must lie in \(1, 65536\], got 1\.0"),
    ],
)
def test_bad_input_is_refused_by_name(bound: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound(*arguments)

"""The published curves of experiments/accounting, each against an independent computation."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant as OracleAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom, norm

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, rdp_sampled_gaussian
from fedsim.accountant.rdp.without_replacement import rdp_without_replacement

SCRIPT = Path(__file__).parents[2] / "experiments" / "accounting" / "published_curves.py"
if not SCRIPT.exists():
    pytest.skip("runs a script of a checkout", allow_module_level=True)
curves: Any = SimpleNamespace(**run_path(str(SCRIPT)))
rdp_published, rdp_tightened = curves.rdp_published, curves.rdp_tightened
rdp_lower_bound, renyi_gaussians = curves.rdp_lower_bound, curves.renyi_gaussians
bad_case_rdp_clt, good_case_rdp_clt = curves.bad_case_rdp_clt, curves.good_case_rdp_clt
ALL = (rdp_lower_bound, rdp_without_replacement, rdp_tightened, rdp_published)


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
    assert rdp_tightened(q[0] / q[1], z, orders) == pytest.approx(expected, rel=1e-9)


def published(q: float, z: float, order: int, *, tightened: bool) -> float:
    """Theorems 9 and 27 as printed, with the alternating sums at 300 digits."""
    with mp.workdps(300):
        q, inverse = mp.mpf(q), 2 / mp.mpf(z) ** 2  # 1 / (2 z_r^2)

        @cache
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
        (rdp_published, False),
        (rdp_tightened, True),
    ):
        expected = published(q, z, order, tightened=tightened)
        assert function(q, z, (order,))[0] == pytest.approx(expected, rel=1e-9)


def test_dp_accountings_alternating_sums_lose_digits_at_large_noise() -> None:
    """Version 0.6 takes forward differences in double precision: here over nine times the theorem.

    How far off depends on the last bits of the machine's exp and log: 9.5 and 10.0 were seen.
    """
    q, z, order = 0.3, 100.0, 96.0
    exact = published(q, z, int(order), tightened=True)
    assert rdp_tightened(q, z, (order,))[0] == pytest.approx(exact, rel=1e-9)
    assert oracle(300, 1000, z / 2, (order,))[0] / exact > 2.0


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
    assert rdp_lower_bound(q, z, (order,))[0] == pytest.approx(float(expected), rel=1e-9)
    assert rdp_lower_bound(q, z, (order,)) == rdp_sampled_gaussian(q, z / 2, (order,))


@given(q=st.floats(1e-5, 0.999), z=st.floats(0.05, 200.0))
@settings(max_examples=60, deadline=None)
def test_order_of_the_curves(q: float, z: float) -> None:
    orders = (1.25, 2.0, 3.0, 7.0, 8.5, 33.0, 64.0)
    lower, ours, tight, loose = (bound(q, z, orders) for bound in ALL)
    slack = 1 + 1e-10
    assert np.all(lower <= ours * slack)
    assert np.all(ours <= tight * slack)
    assert np.all(tight <= loose * slack)


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


def test_the_reference_table() -> None:
    """T = 1000, q = .01, z_r = 1, delta = 1e-5: z for z_r and Poisson for WOR are large errors."""
    curves = {bound: 1000 * bound(0.01, 2.0, DEFAULT_ORDERS[:-4]) for bound in ALL}
    found = [epsilon_from_rdp(DEFAULT_ORDERS[:-4], curves[bound], 1e-5)[0] for bound in ALL]
    assert found == pytest.approx([2.10, 2.46, 3.58, 3.58], abs=6e-3)
    at_z_1 = 1000 * rdp_tightened(0.01, 1.0, DEFAULT_ORDERS[:-4])
    right = epsilon_from_rdp(DEFAULT_ORDERS[:-4], at_z_1, 1e-5)[0]
    assert right == pytest.approx(20.99, abs=0.05)  # z = 1; 3.58 if z is passed where z/2 belongs


def test_fractional_orders_of_the_published_bounds_are_chords() -> None:
    low, middle, high = rdp_published(0.1, 2.0, (3.0, 3.5, 4.0)) * np.array([2.0, 2.5, 3.0])
    assert middle == pytest.approx((low + high) / 2)


def test_the_tightened_bound_with_z_for_half_z_under_reports() -> None:
    """60 of 600, z = 2, 100 steps; the accountants' own figures are in tests/accountant."""
    orders = tuple(float(order) for order in range(2, 65))
    for noise, expected in ((2.0, 14.05), (4.0, 5.38)):
        epsilon, _ = epsilon_from_rdp(orders, 100 * rdp_tightened(0.1, noise, orders), 1e-5)
        assert epsilon == pytest.approx(expected, abs=0.01)


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
def test_a_bad_curve_is_refused_by_name(bound: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound(*arguments)


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


@pytest.mark.parametrize(
    ("order", "pair"),
    [
        (0.25, (0.0, 1.0, 1.0, 2.0)),
        (1.3, (1.0, 2.0, -0.5, 1.7)),
        (2.9, (0.0, 1.0, 1.0, 1.0)),
        (2.9, (0.3, 1.0, 0.3, 1.001)),
    ],
)
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
    exact = rdp_lower_bound(0.1, 10.0, ORDERS)
    assert np.all(np.isfinite(exact))
    assert np.all(exact <= rdp_without_replacement(0.1, 10.0, ORDERS))
    clt = bad_case_rdp_clt(0.1, 10.0, ORDERS)
    assert clt[1] == pytest.approx(exact[1], rel=1e-3)
    assert clt[-1] < 0.97 * exact[-1]  # not an upper bound
    # infinite from order 1 + s^2/(q (1-q)) = 278.8 on, where the mixture is finite
    edge = 1 + 25 / 0.09
    assert bad_case_rdp_clt(0.1, 10.0, (edge - 1, edge + 1))[1] == math.inf
    assert bad_case_rdp_clt(0.1, 10.0, (edge - 1,))[0] < math.inf
    assert np.all(np.isfinite(rdp_lower_bound(0.1, 10.0, (edge + 1,))))


def good_case_exactly(m: int, n: int, s: float, order: float) -> float:
    """The hypergeometric mixture of Gaussians against its mirror image."""
    upper, k = (n + 1) // 2, np.arange(0, m + 1)
    weights = hypergeom.pmf(k, n, upper, m)
    centres = k - m / 2  # sum of i halves and m - i minus halves
    x = np.linspace(-30.0, 30.0, 6001)
    density = norm.pdf(x[:, None], centres, s) @ weights
    mirrored = density[::-1]
    return math.log(np.trapezoid(mirrored * (density / mirrored) ** order, x)) / (order - 1)


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
    assert np.all(good < rdp_lower_bound(100 / 1001, 10.0, ORDERS))


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

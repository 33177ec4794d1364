"""RDP of sampling without replacement against an integral and against data sets written out."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from fedsim.accountant.rdp.without_replacement import rdp_without_replacement


def direct(order: float, q: float, z: float) -> float:
    """1 + a (a-1) int (e^((a-1) x) + e^(-a x)) h(e^x) dx, h in closed form: the first way."""
    a, s = order, z / 2
    # Points x > 1/2 of the Gaussians where the likelihood ratio is e^loss.
    places = [s * k for k in (0.5, 1, 2, 4, 7, 12)] + [a + k * s for k in (-6, -3, 0, 3, 6, 12)]
    ends = np.array(sorted({0.0, *(math.log1p(q * math.expm1(p / s**2)) for p in places if p > 0)}))
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = np.diff(ends) / 2
    x = (half[:, None] * (nodes + 1) + ends[:-1, None]).ravel()
    log_t = np.log1p(np.expm1(x) / q)
    near, far = log_ndtr(1 / (2 * s) - log_t * s), log_ndtr(-1 / (2 * s) - log_t * s)
    log_profile = math.log(q) + near + np.log(-np.expm1(far + log_t - near))
    log_terms = np.logaddexp((a - 1) * x, -a * x) + log_profile
    log_terms += np.log(a * (a - 1) * np.outer(half, weights)).ravel()
    return float(np.logaddexp(0.0, np.logaddexp.reduce(log_terms))) / (a - 1)


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


@given(q=st.floats(1e-5, 0.999), z=st.floats(0.05, 200.0), factor=st.floats(1.0, 3.0))
@settings(max_examples=20, deadline=None)
def test_monotony(q: float, z: float, factor: float) -> None:
    orders = (1.25, 2.0, 3.0, 7.0, 8.5, 33.0, 64.0)
    ours, slack = rdp_without_replacement(q, z, orders), 1 + 1e-10
    assert np.all(ours <= 2 * np.array(orders) / z**2 * slack)  # sampling never hurts
    assert np.all(np.diff(ours) >= -1e-10 * ours[1:])
    assert np.all(rdp_without_replacement(min(1.0, q * factor), z, orders) >= ours / slack)
    assert np.all(rdp_without_replacement(q, z * factor, orders) <= ours * slack)


@pytest.mark.filterwarnings("error")
def test_ends() -> None:
    orders = (1.5, 2.0, 64.0, 300.0)
    assert rdp_without_replacement(1.0, 1.7, orders) == pytest.approx(
        np.array(orders) * 2 / 1.7**2
    )  # z/2
    assert np.all(rdp_without_replacement(0.0, 1.7, orders) == 0.0)
    assert np.all(np.isinf(rdp_without_replacement(0.3, 0.0, orders)))
    assert np.all(rdp_without_replacement(0.0, 0.0, orders) == 0.0)
    for z in (1e-200, 1e-3, 0.01, 1e4, 1e8, 1e300):
        for q in (5e-324, 1e-12, 0.5, 1 - 1e-12):
            assert np.all(rdp_without_replacement(q, z, orders) >= 0.0)
    near = rdp_without_replacement(1 - 1e-9, 1.7, orders)
    assert near == pytest.approx(np.array(orders) * 2 / 1.7**2, rel=1e-6)


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
def test_bad_input_is_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rdp_without_replacement(*arguments)

"""Classical amplification and composition, against mpmath and published numbers."""

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.accountant.pld.privacy_profile import gaussian_epsilon, gaussian_log_delta
from fedsim.accountant.textbook.classical import (
    advanced_composition,
    basic_composition,
    kov_composition,
    optimal_composition,
    subsample_amplification,
)


@given(epsilon=st.floats(0.0, 50.0), q=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_amplification_equals_its_formula(epsilon: float, q: float) -> None:
    with mp.workdps(50):
        expected = mp.log1p(mp.mpf(q) * mp.expm1(mp.mpf(epsilon)))
    amplified, delta = subsample_amplification(epsilon, 1e-5, q)
    assert amplified == pytest.approx(float(expected), rel=1e-12, abs=1e-300)
    assert delta == q * 1e-5
    assert amplified <= epsilon * (1 + 1e-15)


def test_amplification_is_not_q_times_epsilon_and_does_not_overflow() -> None:
    assert subsample_amplification(2.0, 0.0, 0.1)[0] > 1.6 * 0.1 * 2.0
    assert subsample_amplification(5000.0, 0.0, 0.5)[0] == pytest.approx(5000 - math.log(2))


def test_the_poisson_profile_is_the_amplified_one() -> None:
    """BBG Theorem 8 is an equality for the Gaussian: delta((1-q) N0 + q N1 || N0) = q delta0."""
    q, z, epsilon = 0.1, 1.0, 1.3
    amplified, delta = subsample_amplification(
        epsilon, math.exp(gaussian_log_delta(1 / z, epsilon)), q
    )
    with mp.workdps(30):
        edge = 0.5 + z * z * epsilon

        def excess(x: Any) -> Any:
            p0, p1 = mp.npdf(x, 0, z), mp.npdf(x, 1, z)
            return (1 - q) * p0 + q * p1 - mp.exp(amplified) * p0

        found: Any = mp.quad(excess, [edge, edge + 3, edge + 10, 60])
        assert float(found) == pytest.approx(delta)


def test_basic_composition_adds() -> None:
    total = basic_composition([0.5, 0.25, 1.0], [1e-6, 0.0, 1e-5])
    assert total == pytest.approx((1.75, 1.1e-5), rel=1e-15)
    assert basic_composition([], []) == (0.0, 0.0)
    assert basic_composition([1.0] * 3, [0.5] * 3) == (3.0, 1.0)


def test_advanced_and_kov_composition_equal_their_formulas() -> None:
    e, d, k, slack = 0.1, 1e-8, 100, 1e-5
    with mp.workdps(50):
        root = e * mp.sqrt(2 * k * mp.log(1 / mp.mpf(slack)))
        advanced = root + k * mp.mpf(e) * mp.expm1(e)
        b = k * mp.mpf(e) * mp.expm1(e) / (mp.exp(e) + 1)
        second = b + e * mp.sqrt(2 * k * mp.log(mp.e + mp.sqrt(k * e * e) / mp.mpf(slack)))
        kov = min(k * mp.mpf(e), second, b + root)
        total = 1 - (1 - mp.mpf(d)) ** k * (1 - mp.mpf(slack))
    assert advanced_composition(e, d, k, slack) == pytest.approx((float(advanced), k * d + slack))
    assert kov_composition(e, d, k, slack) == pytest.approx((float(kov), float(total)), rel=1e-12)


def test_kov_takes_the_smallest_branch_not_the_third() -> None:
    e, k, slack = 0.5, 10, 1e-5
    third = k * e * math.tanh(e / 2) + e * math.sqrt(2 * k * math.log(1 / slack))
    assert third == pytest.approx(8.8, abs=0.05)
    assert kov_composition(e, 0.0, k, slack)[0] == 5.0


def theorem_3_3(e: float, k: int, i: int) -> Any:
    """delta_i at (k - 2i) e, as printed, 50 digits."""
    with mp.workdps(50):
        e = mp.mpf(e)
        terms = (
            mp.binomial(k, m) * (mp.exp((k - m) * e) - mp.exp((k - 2 * i + m) * e))
            for m in range(i)
        )
        return mp.fsum(terms) / (1 + mp.exp(e)) ** k


@pytest.mark.parametrize(
    ("e", "k", "i"),
    [(0.1, 20, 5), (1.0, 7, 3), (0.01, 500, 249), (3.0, 40, 9), (0.004, 1000, 470)],
)
def test_optimal_composition_equals_the_theorem(e: float, k: int, i: int) -> None:
    expected, target = float(theorem_3_3(e, k, i)), (k - 2 * i) * e
    assert optimal_composition(e, 0.0, k, expected) == pytest.approx(target, rel=1e-9)
    with mp.workdps(50):
        total = float(1 - (1 - mp.mpf("1e-7")) ** k * (1 - theorem_3_3(e, k, i)))
    assert optimal_composition(e, 1e-7, k, total) == pytest.approx(target, rel=1e-9)


def test_one_release_is_randomised_response() -> None:
    e, target = 2.0, 0.7
    delta = (math.exp(e) - math.exp(target)) / (1 + math.exp(e))
    assert optimal_composition(e, 0.0, 1, delta) == pytest.approx(target, rel=1e-14)


def test_optimal_composition_of_many_releases() -> None:
    """Small epsilon, many releases: the limit is a Gaussian with mu = eps sqrt(k)."""
    e, k = 3e-3, 10**5
    assert optimal_composition(e, 0.0, k, 1e-5) == pytest.approx(
        gaussian_epsilon(e * math.sqrt(k), 1e-5), rel=1e-4
    )
    assert optimal_composition(e, 1e-8, k, 1e-5) == math.inf


@given(
    e=st.floats(1e-4, 3.0),
    d=st.sampled_from([0.0, 1e-12, 1e-9]),
    k=st.integers(1, 300),
    slack=st.floats(1e-9, 0.3),
)
@example(e=3.0, d=0.0, k=14, slack=1e-9)  # two billionths below 42: the last digit counts
@settings(max_examples=30, deadline=None)
def test_order_of_the_bounds_and_inverse(e: float, d: float, k: int, slack: float) -> None:
    kov, total = kov_composition(e, d, k, slack)
    optimal = optimal_composition(e, d, k, total)
    assert optimal <= kov * (1 + 1e-9) + 1e-9
    assert kov <= min(k * e, advanced_composition(e, d, k, slack)[0]) * (1 + 1e-12)
    assert optimal_composition(e, d, k + 1, total) >= optimal * (1 - 1e-9)


def test_edges() -> None:
    assert optimal_composition(0.5, 0.0, 0, 1e-5) == 0.0
    assert optimal_composition(0.0, 0.0, 10, 1e-5) == 0.0
    assert optimal_composition(0.5, 1.0, 1, 1e-5) == math.inf
    assert kov_composition(0.5, 1.0, 1, 0.1)[1] == 1.0
    assert optimal_composition(0.5, 0.0, 10, 1e-300) == pytest.approx(5.0)


def test_the_published_strong_composition_figure_is_not_a_valid_bound() -> None:
    """Abadi et al. 2016 print 9.34 (E = 100) and 24.22 (E = 400) at q = .01, z = 4, delta = 1e-5.

    They follow from the classical calibration used above epsilon = 1 and an amplified epsilon of
    q epsilon; with log(1 + q (e^eps - 1)), and even the exact Gaussian, it is 16.9 and 50.8.
    """
    for epochs, published, valid in ((100, 9.34, 16.87), (400, 24.22, 50.85)):
        count, best_linear, best_valid = epochs * 100, math.inf, math.inf
        for share in np.logspace(-5, -1e-4, 200):
            delta0, slack = share * 1e-5 / (count * 0.01), 1e-5 * (1 - share)
            linear = 0.01 * math.sqrt(2 * math.log(1.25 / delta0)) / 4.0
            best_linear = min(best_linear, advanced_composition(linear, 0.0, count, slack)[0])
            proven = subsample_amplification(gaussian_epsilon(0.25, delta0), delta0, 0.01)[0]
            best_valid = min(best_valid, advanced_composition(proven, 0.0, count, slack)[0])
        assert best_linear == pytest.approx(published, rel=2e-3)
        assert best_valid == pytest.approx(valid, rel=5e-3)


BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (subsample_amplification, (-1.0, 0.0, 0.5), r"epsilon must .* got -1\.0"),
    (subsample_amplification, (1.0, 1.5, 0.5), r"delta must be between 0 and 1, got 1\.5"),
    (subsample_amplification, (1.0, 0.0, 1.1), r"sampling_rate must .* got 1\.1"),
    (basic_composition, ([1.0], []), "same length, got 1 and 0"),
    (basic_composition, ([-1.0], [0.0]), r"epsilons must .* got -1\.0"),
    (advanced_composition, (1.0, 0.0, 1.5, 0.1), r"count must be a whole number >= 0, got 1\.5"),
    (advanced_composition, (1.0, 0.0, -1, 0.1), "count must be a whole number >= 0, got -1"),
    (kov_composition, (1.0, 0.0, 3, 0.0), r"slack must lie strictly between 0 and 1, got 0\.0"),
    (kov_composition, (math.inf, 0.0, 3, 0.1), "epsilon must be finite and >= 0, got inf"),
    (optimal_composition, (1.0, 0.0, 3, 1.0), r"target_delta must .* got 1\.0"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)

"""PATE: the bounds against 50 digits, against exact outcome probabilities, and brute force."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erfc
from scipy.stats import norm

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.textbook.pate import (
    data_dependent_rdp,
    gnmax_local_sensitivities,
    gnmax_log_q,
    gnmax_rdp,
    gnmax_sequence_rdp,
    gnss_rdp,
    smooth_release,
    smooth_sensitivity,
)

ORDERS = (1.5, 2.0, 4.0, 8.0, 20.0, 64.0)


def theorem_6(log_q: float, sigma: float, order: float) -> float:
    """Papernot et al. 2018, Theorem 6 with Proposition 10, 50 digits, else order / sigma^2."""
    with mp.workdps(50):
        q, s, a = mp.exp(mp.mpf(log_q)), mp.mpf(sigma), mp.mpf(order)
        independent = a / s**2
        mu2 = s * mp.sqrt(mp.log(1 / q))
        mu1 = mu2 + 1
        eps1, eps2 = mu1 / s**2, mu2 / s**2
        if mu2 <= 1 or a > mu1:
            return float(independent)
        limit = mp.exp((mu2 - 1) * eps2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2
        if q > limit or q * mp.exp(eps2) >= 1:
            return float(independent)
        big_a = (1 - q) / (1 - (q * mp.exp(eps2)) ** ((mu2 - 1) / mu2))
        big_b = mp.exp(eps1) / q ** (1 / (mu1 - 1))
        value = mp.log((1 - q) * big_a ** (a - 1) + q * big_b ** (a - 1)) / (a - 1)
        return float(min(independent, value))


@pytest.mark.parametrize("sigma", [2.0, 10.0, 40.0, 100.0])
def test_the_data_dependent_bound_equals_the_theorem(sigma: float) -> None:
    log_qs = [-0.1, -1.0, -5.0, -20.0, -100.0, -500.0, -5000.0]
    ours = data_dependent_rdp(log_qs, sigma, ORDERS)
    assert ours.shape == (7, 6)
    for row, log_q in zip(ours, log_qs, strict=True):
        expected = [theorem_6(log_q, sigma, order) for order in ORDERS]
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-16)
    assert np.all(data_dependent_rdp(-math.inf, sigma, ORDERS) == 0.0)
    assert np.all(ours <= gnmax_rdp(sigma, ORDERS) * (1 + 1e-15))


def test_log_q_is_the_proposition() -> None:
    votes = np.array([[60.0, 30.0, 10.0], [34.0, 33.0, 33.0], [100.0, 0.0, 0.0]])
    for sigma in (5.0, 40.0):
        expected = [
            0.5 * sum(erfc((max(row) - v) / (2 * sigma)) for v in sorted(row)[:-1]) for row in votes
        ]
        assert np.exp(gnmax_log_q(votes, sigma)) == pytest.approx(
            np.minimum(expected, 1.0), rel=1e-12
        )
    assert gnmax_log_q([1e6, 0.0], 1.0)[0] < -1e11  # no underflow
    assert gnmax_log_q([0.0, 0.0, 0.0, 0.0], 1.0)[0] == 0.0  # a union bound, at most 1


def outcome_probabilities(votes: tuple[int, ...], sigma: float) -> np.ndarray:
    """P[argmax of votes + noise = i], by quadrature over the winner's noisy count."""
    x = np.linspace(-12 * sigma, max(votes) + 12 * sigma, 20001)

    def cdf(v: int) -> np.ndarray:
        return 0.5 * erfc(-(x - v) / (sigma * math.sqrt(2)))

    density = [
        np.exp(-0.5 * ((x - v) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)) for v in votes
    ]
    result = []
    for i, _ in enumerate(votes):
        others = np.prod([cdf(v) for j, v in enumerate(votes) if j != i], axis=0)
        result.append(float(np.sum(density[i] * others)) * (x[1] - x[0]))
    return np.array(result)


def neighbours(votes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, j in product(range(len(votes)), repeat=2):
        if i != j and votes[i] > 0:
            moved = list(votes)
            moved[i] -= 1
            moved[j] += 1
            yield tuple(moved)


@pytest.mark.parametrize("votes", [(40, 5, 5), (50, 0, 0), (30, 15, 5), (20, 20, 10)])
@pytest.mark.parametrize("sigma", [4.0, 7.0])
def test_the_bounds_hold_for_the_actual_mechanism(votes: tuple[int, ...], sigma: float) -> None:
    p = outcome_probabilities(votes, sigma)
    assert p.sum() == pytest.approx(1.0)
    assert np.sort(p)[:-1].sum() <= math.exp(gnmax_log_q(votes, sigma)[0]) * (1 + 1e-6)
    (bound,) = data_dependent_rdp(gnmax_log_q(votes, sigma), sigma, ORDERS)
    for other in neighbours(votes):
        q = outcome_probabilities(other, sigma)
        for order, value in zip(ORDERS, bound, strict=True):
            assert math.log(np.sum(q * (p / q) ** order)) / (order - 1) <= value + 1e-12


def test_consensus_costs_much_less_than_the_worst_case() -> None:
    votes = np.tile([240.0, 5.0, 5.0], (100, 1))
    dependent, independent = gnmax_sequence_rdp(votes, 25.0, ORDERS), 100 * gnmax_rdp(25.0, ORDERS)
    assert np.all(dependent[:4] < 0.01 * independent[:4])
    at_tie = gnmax_sequence_rdp(np.tile([84.0, 83.0, 83.0], (100, 1)), 25.0, ORDERS)
    assert at_tie == pytest.approx(independent)
    assert epsilon_from_rdp(ORDERS, dependent, 1e-5)[0] < epsilon_from_rdp(ORDERS, at_tie, 1e-5)[0]


# --- Smooth sensitivity ---------------------------------------------------------------------------


def costs(votes: tuple[int, ...], sigma: float, order: float) -> float:
    return float(gnmax_sequence_rdp([votes], sigma, (order,))[0])


@pytest.mark.parametrize(("sigma", "order"), [(2.0, 2.0), (4.0, 3.0), (3.0, 5.0)])
def test_local_sensitivity_against_brute_force(sigma: float, order: float) -> None:
    """All histograms of 12 teachers over 3 classes, at every distance."""
    teachers = 12
    every = [v for v in product(range(teachers + 1), repeat=3) if sum(v) == teachers]
    cost = {v: costs(v, sigma, order) for v in every}
    local = {v: max(abs(cost[v] - cost[w]) for w in neighbours(v)) for v in every}
    for start in [(12, 0, 0), (8, 3, 1), (4, 4, 4)]:
        bounds = gnmax_local_sensitivities([start], sigma, order)
        assert bounds.shape == (teachers + 1,)
        assert np.all(np.diff(bounds) >= 0.0)
        for distance in range(teachers + 1):
            within = [
                local[v]
                for v in every
                if sum(abs(a - b) for a, b in zip(v, start, strict=True)) // 2 <= distance
            ]
            assert bounds[distance] >= max(within) - 1e-15
    assert gnmax_local_sensitivities([(12, 0, 0)], sigma, order)[0] <= order / sigma**2


def test_local_sensitivities_of_several_queries_add() -> None:
    first, second = (200, 40, 10), (240, 5, 5)
    both = gnmax_local_sensitivities([first, second], 20.0, 8.0)
    apart = [gnmax_local_sensitivities([votes], 20.0, 8.0) for votes in (first, second)]
    assert both == pytest.approx(sum(apart), rel=0.05)
    assert np.all(both >= 0.0)


def test_consensus_makes_the_cost_stable() -> None:
    """Far from the switch to the worst case the cost hardly moves, so publishing it is cheap."""
    firm = smooth_release(np.tile([245, 3, 2], (50, 1)), 15.0, 10.0, 10.0)
    split = smooth_release(np.tile([150, 80, 20], (50, 1)), 15.0, 10.0, 10.0)
    assert firm.cost < split.cost
    assert firm.smooth_sensitivity < 0.2 * split.smooth_sensitivity
    assert firm.release_rdp == split.release_rdp  # it depends on no vote


def test_publishing_adds_the_stated_noise() -> None:
    release = smooth_release(np.tile([200, 30, 20], (20, 1)), 20.0, 8.0, 5.0, beta=0.02)
    local = gnmax_local_sensitivities(np.tile([200, 30, 20], (20, 1)), 20.0, 8.0)
    assert release.smooth_sensitivity == smooth_sensitivity(local, 0.02)
    assert release.noise_std == 5.0 * release.smooth_sensitivity
    assert release.release_rdp == gnss_rdp(5.0, 0.02, 8.0)
    rng = np.random.default_rng(1)
    draws = np.array([release.publish(rng) for _ in range(4000)])
    assert draws.mean() == pytest.approx(release.cost, abs=4 * release.noise_std / 4000**0.5)
    assert draws.std() == pytest.approx(release.noise_std, rel=0.05)


@given(values=st.lists(st.floats(0.0, 10.0), min_size=2, max_size=30), beta=st.floats(1e-3, 2.0))
@settings(max_examples=30, deadline=None)
def test_smooth_sensitivity_is_smooth(values: list[float], beta: float) -> None:
    """A neighbour's local sensitivities are at most these, one step farther."""
    here = np.maximum.accumulate(values)
    there = np.append(here[1:], here[-1])
    assert smooth_sensitivity(there, beta) <= math.exp(beta) * smooth_sensitivity(here, beta) * (
        1 + 1e-12
    )
    assert smooth_sensitivity(here, beta) >= here[0]


def renyi_gaussians(order: float, shift: float, ratio: float) -> float:
    """D_order(N(0, 1) || N(shift, ratio^2)), by the formula of Gil et al. 2013."""
    spread = 1 - order + order * ratio**2
    logarithms = math.log(spread) / 2 - order * math.log(ratio)
    return order * shift**2 / (2 * spread) + logarithms / (1 - order)


@given(sigma=st.floats(0.5, 50.0), order=st.floats(1.1, 60.0), share=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_gnss_is_the_worst_of_all_smooth_neighbours(
    sigma: float, order: float, share: float
) -> None:
    beta = share / (2 * order)
    bound = gnss_rdp(sigma, beta, order)
    for log_ratio in np.linspace(-beta, beta, 21):
        ratio = math.exp(log_ratio)  # of the second data set's smooth sensitivity to the first's
        shift = min(1.0, ratio) / sigma
        assert renyi_gaussians(order, shift, ratio) <= bound * (1 + 1e-9)
    worst = renyi_gaussians(order, math.exp(-beta) / sigma, math.exp(-beta))
    assert bound == pytest.approx(worst, rel=1e-6)
    assert gnss_rdp(sigma, 1e-12, order) == pytest.approx(order / (2 * sigma**2), rel=1e-6)


def test_the_published_form_of_gnss_under_reports() -> None:
    order, sigma = 20.0, 10.0
    beta = 0.49 / order
    printed = order * math.exp(2 * beta) / sigma**2
    printed += (beta * order - 0.5 * math.log(1 - 2 * order * beta)) / (order - 1)
    k = math.exp(-beta)  # both smooth sensitivities within e^beta, the shift within both
    x = np.linspace(-80.0, 80.0, 16_001)
    log_p, log_q = norm.logpdf(x), norm.logpdf(x, k / sigma, k)
    log_sum = float(np.logaddexp.reduce(order * log_p + (1 - order) * log_q))
    real = (log_sum + math.log(0.01)) / (order - 1)
    assert printed == pytest.approx(0.34, abs=5e-3)
    assert real == pytest.approx(2.24, abs=5e-3)
    assert gnss_rdp(sigma, beta, order) == pytest.approx(real, rel=1e-9)
    assert gnss_rdp(sigma, 0.6, order) == math.inf


BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (gnmax_rdp, (0.0,), r"sigma must be finite and > 0, got 0\.0"),
    (gnmax_log_q, ([3.0], 1.0), r"votes must have the shape .* got \(1,\)"),
    (gnmax_log_q, ([3.0, -1.0], 1.0), r"votes must be finite counts >= 0, got -1\.0"),
    (gnmax_log_q, ([3.0, math.nan], 1.0), "votes must be finite counts >= 0, got nan"),
    (gnmax_log_q, ([3.0, 1.0], -1.0), r"sigma must .* got -1\.0"),
    (data_dependent_rdp, (0.1, 1.0), r"log_q must be a list of numbers <= 0, got 0\.1"),
    (data_dependent_rdp, (math.nan, 1.0), "log_q must be a list of numbers <= 0, got nan"),
    (gnmax_local_sensitivities, ([[3, 1], [3, 2]], 1.0, 2.0), r"same number .* got \[4\.0, 5\.0\]"),
    (gnmax_local_sensitivities, ([[2.5, 1]], 1.0, 2.0), r"votes must be a whole number .* 3\.5"),
    (smooth_sensitivity, (np.array([1.0]), 0.0), r"beta must .* got 0\.0"),
    (smooth_sensitivity, (np.array([-1.0]), 0.1), "local_sensitivities must be .* >= 0"),
    (gnss_rdp, (0.0, 0.1, 2.0), r"noise_multiplier must .* got 0\.0"),
    (gnss_rdp, (1.0, 0.1, 1.0), r"orders must lie in .* got 1\.0"),
    (smooth_release, ([[3, 1]], 1.0, 2.0, -1.0), r"noise_multiplier must .* got -1\.0"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)

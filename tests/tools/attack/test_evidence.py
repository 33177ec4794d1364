"""Lower bounds from an attack's hits and misses: right as often as they say, and not far off."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import beta, norm

from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
from fedsim.tools.attack.evidence import (
    correlation_interval,
    deviation_interval,
    distance_to_normal,
    gdp_lower_bound,
    rate_interval,
    run_lower_bound,
    shift_lower_bound,
)
from fedsim.tools.attack.views import gaussian_pair_epsilon

MISS = 1e-3


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(1e-6, 0.4))
def test_rates_have_the_ends_of_clopper_and_pearson(trials: int, share: float, miss: float) -> None:
    hits = round(share * trials)
    found = rate_interval(hits, trials, miss=miss)
    low = 0.0 if hits == 0 else beta.ppf(miss, hits, trials - hits + 1)
    high = 1.0 if hits == trials else beta.isf(miss, hits + 1, trials - hits)
    assert found.low == pytest.approx(low, rel=1e-6, abs=1e-12)
    assert found.high == pytest.approx(high, rel=1e-6)
    assert found.low <= found.estimate <= found.high


def test_of_no_trials_nothing_is_known() -> None:
    nothing = rate_interval(0, 0, miss=MISS)
    assert (nothing.low, nothing.high) == (0.0, 1.0)
    assert gdp_lower_bound(nothing, nothing) == 0.0
    assert deviation_interval(np.empty(0), miss=MISS).high == math.inf
    assert correlation_interval(np.empty(0), np.empty(0), miss=MISS).low == -1.0


@pytest.mark.parametrize("mu", [0.25, 1.0, 2.0])
def test_the_proven_mu_is_below_the_true_one_and_close(mu: float) -> None:
    """300 attacks on a Gaussian mechanism: at 2 MISS each, 5 wrong ones have probability 4e-4."""
    rng, proven = np.random.default_rng(0), []
    for _ in range(300):
        outside, inside = rng.normal(size=20_000), rng.normal(size=20_000) + mu
        alarms = rate_interval(int((outside > mu / 2).sum()), outside.size, miss=MISS)
        misses = rate_interval(int((inside <= mu / 2).sum()), inside.size, miss=MISS)
        proven.append(gdp_lower_bound(alarms, misses))
    assert sum(one > mu for one in proven) < 5
    assert np.median(proven) > mu - 0.08


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_mu_of_a_shift_is_proven_by_the_noise_alone(law: str) -> None:
    """200 samples: at MISS each, 5 wrong bounds have probability 3e-6.

    The true μ of Laplace noise is the least for which no threshold beats a Gaussian attack; at the
    threshold 1 of noise of scale 1 and shift 1, both error rates are known.
    """
    rng, shift = np.random.default_rng(4), 0.5
    if law == "gaussian":
        true, thresholds = shift, [-0.75, 0.25, 1.25]
    else:
        true = -ndtri(0.5 * math.exp(-1.0)) - ndtri(1.0 - 0.5 * math.exp(-0.5))
        thresholds = [1.0]
    proven = []
    for _ in range(200):
        noise = np.sort(rng.normal(size=20_000) if law == "gaussian" else rng.laplace(size=20_000))
        proven.append(shift_lower_bound(noise, shift, thresholds, miss=MISS))
    assert sum(one > true for one in proven) < 5
    assert np.median(proven) > true - 0.08


@pytest.mark.parametrize(("shift", "deviation"), [(2.0, 1.0), (2.0, 1.3), (0.5, 1.0)])
def test_the_epsilon_of_whole_runs_is_below_the_true_one_and_not_far(
    shift: float, deviation: float
) -> None:
    """200 audits with 300 scores of each kind: at MISS each, 5 wrong bounds have 3e-6."""
    rng, delta = np.random.default_rng(5), 1e-3
    true = gaussian_pair_epsilon(shift, 1.0, deviation, delta=delta)
    proven = [
        run_lower_bound(
            rng.normal(size=3000),
            shift + deviation * rng.normal(size=300),
            [0.0, 1.0, 2.0, 3.0],
            delta=delta,
            miss=MISS,
        )
        for _ in range(200)
    ]
    assert sum(one > true for one in proven) < 5
    assert np.median(proven) > 0.1 * true
    assert run_lower_bound(np.empty(0), np.empty(0), [0.0], delta=delta, miss=MISS) == 0.0


@pytest.mark.parametrize(
    ("name", "samples"),
    [("gaussian", 100), ("uniform", 5), ("cut at two deviations", 5), ("rounded", 5)],
)
def test_noise_of_another_law_is_told_from_gaussian_noise(name: str, samples: int) -> None:
    """Each sample of 100,000; at MISS each, 4 false alarms in 100 have probability 4e-6."""
    rng, off = np.random.default_rng(6), 0
    for _ in range(samples):
        values = rng.normal(size=100_000)
        if name == "uniform":
            values = rng.uniform(-math.sqrt(3.0), math.sqrt(3.0), size=100_000)
        elif name == "cut at two deviations":
            values = np.clip(values, -2.0, 2.0)
        elif name == "rounded":
            values = np.round(4 * values) / 4
        deviation = deviation_interval(values, miss=MISS).estimate
        off += distance_to_normal(np.sort(values), deviation, miss=MISS).low > 0.0
    assert off < 4 if name == "gaussian" else off == samples


@pytest.mark.parametrize("inside", [1.0, 1.0 + 1e-12, 1.0 + 1e-5, 1.2, 3.0])
@pytest.mark.parametrize("shift", [0.0, 0.3, 2.5, 20.0])
def test_the_epsilon_of_a_gaussian_pair_is_that_of_the_integral(
    shift: float, inside: float
) -> None:
    """At the returned ε, ∫ max(0, p − e^ε q) by quadrature is δ in the worse direction."""
    delta = 1e-3
    epsilon = gaussian_pair_epsilon(shift, 1.0, inside, delta=delta)

    def excess(p_mean: float, p: float, q_mean: float, q: float) -> float:
        x = np.linspace(-60.0, 60.0, 200_001)
        density = norm.pdf(x, p_mean, p) - np.exp(epsilon + norm.logpdf(x, q_mean, q))
        return float(np.trapezoid(np.maximum(0.0, density), x))

    worst = max(excess(0.0, 1.0, shift, inside), excess(shift, inside, 0.0, 1.0))
    if epsilon == 0.0:
        assert worst <= delta
    else:
        assert worst == pytest.approx(delta, rel=1e-3)


def test_the_epsilon_of_equal_deviations_is_that_of_the_gaussian_mechanism() -> None:
    assert gaussian_pair_epsilon(1.0, 1.0, 1.0, delta=1e-5) == pytest.approx(
        gaussian_epsilon(1.0, 1e-5), rel=1e-9
    )
    assert gaussian_pair_epsilon(1e7, 1.0, 1.0, delta=1e-5) == math.inf


@pytest.mark.parametrize(("factor", "samples"), [(1.0, 200), (0.97, 10)])
def test_a_deviation_that_is_3_percent_small_is_told_from_the_claimed_one(
    factor: float, samples: int
) -> None:
    """60,000 values at 1e-3: 0.9 % of room. False alarms of 200 samples: 4 have 8e-6."""
    rng = np.random.default_rng(1)
    found = [
        deviation_interval(factor * rng.normal(size=60_000), miss=MISS).high < 1.0
        for _ in range(samples)
    ]
    assert sum(found) < 4 if factor == 1.0 else all(found)


def test_repeated_noise_is_correlated_and_fresh_noise_is_not() -> None:
    """Of 200 pairs of fresh samples, 6 outside of 2 MISS have probability 4e-6."""
    rng = np.random.default_rng(2)
    one = rng.normal(size=5000)
    assert correlation_interval(one, one, miss=MISS).low > 0.9
    assert correlation_interval(one, -one, miss=MISS).high < -0.9
    pairs = [correlation_interval(*rng.normal(size=(2, 5000)), miss=MISS) for _ in range(200)]
    assert sum(pair.excludes(0.0) for pair in pairs) < 6

"""Lower bounds from an attack's hits and misses: right as often as they say, and not far off."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from fedsim.audit.evidence import (
    correlation_interval,
    deviation_interval,
    gdp_lower_bound,
    known_deviation_mean_interval,
    rate_interval,
)

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
    assert known_deviation_mean_interval(np.empty(0), 1.0, miss=MISS).high == math.inf
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


@pytest.mark.parametrize("factor", [1.0, 0.97])
def test_a_deviation_that_is_3_percent_small_is_told_from_the_claimed_one(factor: float) -> None:
    """60,000 values at 1e-3: 0.9 % of room. False alarms of 200 samples: 4 have 8e-6."""
    rng = np.random.default_rng(1)
    found = [
        deviation_interval(factor * rng.normal(size=60_000), miss=MISS).high < 1.0
        for _ in range(200)
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

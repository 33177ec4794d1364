"""What is said about attackers is a bound: proved from the ledger, and not much above the truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedsim.accountant import PrivacyLedger, make_accountant
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.attack_bound import (
    Profile,
    gaussian_true_positive_rate,
    ledger_profile,
    smallest_mu,
)
from fedsim.accountant.events import Adjacency, Gaussian, PoissonSampled

DELTA = 1e-5


def sampled(rate: float, noise: float, count: int) -> PrivacyLedger:
    return PrivacyLedger().record(PoissonSampled(rate, Gaussian(noise)), count)


def of(
    ledger: PrivacyLedger,
    *,
    accountant: AccountantName = "pld",
    adjacency: Adjacency = "zero_out",
    delta: float = DELTA,
) -> Profile:
    found = ledger_profile(ledger, delta, accountant, adjacency)
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0])
def test_a_gaussian_release_is_its_own_mu_and_the_attack_bound_is_tight(noise):
    profile = of(sampled(1.0, noise, 1))
    assert 1 / noise < profile.mu < 1.002 / noise + 2e-4, "the slack of the sampler is in it"
    for rate in (1e-3, 0.01, 0.1, 0.5):
        best = norm.cdf(1 / noise + norm.ppf(rate))  # Neyman and Pearson
        assert best <= profile.true_positive_bound(rate) <= best + 5e-3


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace_one"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_real_attack_on_one_sampled_step_stays_below_the_bound(accountant, adjacency):
    """The likelihood-ratio test of (1-q) N(0,z²) + q N(1,z²) against N(0,z²), in closed form."""
    q, z = 0.2, 0.7
    profile = of(sampled(q, z, 1), accountant=accountant, adjacency=adjacency)
    for threshold in np.linspace(-2, 3, 60):
        false_alarms = float(norm.sf(threshold / z))
        found = (1 - q) * false_alarms + q * float(norm.sf((threshold - 1) / z))
        assert found <= profile.true_positive_bound(false_alarms) + 1e-12
        assert 1 - false_alarms <= profile.true_positive_bound(1 - found) + 1e-12


def test_the_bound_is_better_than_the_pair_alone():
    profile = of(sampled(0.1, 1.1, 300), delta=1e-3)
    alone = min(1.0, math.exp(profile.epsilon) * 0.01 + profile.delta)
    assert profile.true_positive_bound(0.01) < 0.5 * alone


@settings(max_examples=12, deadline=None)
@given(st.floats(0.01, 0.9), st.floats(1, 8), st.integers(1, 40))
def test_mu_bounds_every_attack_that_the_curve_allows(rate, noise, count):
    profile = of(sampled(rate, noise, count))
    assert profile.mu is not None
    account = make_accountant("pld").compose(PoissonSampled(rate, Gaussian(noise)), count)
    # Between the points of the curve too, where only convexity helps: δ(ε) <= δ_μ(ε) + slack.
    for epsilon in np.linspace(0, profile.curve[-1][0] * 1.2, 97):
        mu = max(profile.mu, 1e-12)
        gaussian = norm.cdf(mu / 2 - epsilon / mu) - math.exp(
            epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        )
        assert account.get_delta(float(epsilon)) <= gaussian + profile.slack * (1 + 1e-6) + 1e-12
    for false_alarms in (0.001, 0.05, 0.4):
        allowed = gaussian_true_positive_rate(profile.mu, false_alarms) + profile.slack
        # One number says less than the whole curve.
        assert profile.true_positive_bound(false_alarms) <= allowed + 5e-3


def test_a_smaller_mu_would_be_wrong():
    profile = of(sampled(0.1, 1.1, 300))
    assert profile.mu is not None
    smaller = 0.995 * profile.mu
    gaps = [
        delta
        - (
            norm.cdf(smaller / 2 - e / smaller)
            - math.exp(e + norm.logcdf(-smaller / 2 - e / smaller))
        )
        for e, delta in profile.curve
    ]
    assert max(gaps) > profile.slack


def test_mu_is_above_the_central_limit_where_that_is_too_small():
    """q = 0.01, z = 1, 10⁴ steps: the central limit gives ε = 6.01 for a true 6.19."""
    q, z, steps = 0.01, 1.0, 10_000
    profile = of(sampled(q, z, steps))
    assert profile.mu is not None
    assert profile.mu > q * math.sqrt(steps * math.expm1(1 / z**2))


def test_mu_is_refused_for_a_curve_that_does_not_end():
    assert smallest_mu(((0.0, 0.5), (1.0, 0.2)), 1e-6) is None
    assert smallest_mu((), 1e-6) is None
    assert smallest_mu(((1.0, 0.0),), 1e-6) is None


def test_next_to_nothing_gives_an_attacker_next_to_nothing():
    profile = of(sampled(1e-4, 50.0, 1))
    assert profile.mu is not None
    assert profile.mu < 1e-3
    assert profile.true_positive_bound(0.01) < 0.0101


def test_without_noise_there_is_no_profile():
    assert ledger_profile(sampled(0.5, 0.0, 1), DELTA) is None


def test_an_epsilon_beyond_what_is_proven_has_no_profile():
    assert ledger_profile(sampled(1.0, 0.01, 100), DELTA) is None


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_rates_outside_0_1_are_refused(rate):
    with pytest.raises(ValueError, match="false_positive_rate must be in"):
        of(sampled(1.0, 1.0, 1)).true_positive_bound(rate)

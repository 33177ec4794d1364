"""Confidence intervals for the rates of an attack and for the size of noise.

The intervals are exact or nearly so. None assumes that the mechanism is as claimed.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, ndtri

from fedsim.accountant.arrays import Floats


@dataclass(frozen=True)
class Interval:
    """An estimate and the confidence interval of the true value."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside the interval."""
        return not self.low <= value <= self.high


def rate_interval(hits: int, trials: int, *, miss: float) -> Interval:
    """Return the Clopper-Pearson interval (1934) of a probability.

    Args:
        hits: number of successes, 0 to `trials`.
        trials: number of independent trials; without any, the interval is [0, 1].
        miss: probability that an end is wrong, the same for both ends.
    """
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    low = float(betaincinv(hits, trials - hits + 1, miss)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1.0 - miss)) if hits < trials else 1.0
    return Interval(hits / trials, low, high)


def gdp_lower_bound(false_alarms: Interval, misses: Interval) -> float:
    """Return the lower bound of μ from an attack's error rates: no μ'-GDP holds for μ' < μ.

    Against a μ-GDP release, no attack beats the test of N(0, 1) against N(μ, 1). Therefore
    Φ⁻¹(1 − false alarms) + Φ⁻¹(1 − misses) ≤ μ (Dong, Roth, Su 2022, arXiv:1905.02383; as an audit
    Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: the bound exceeds the true μ only if the upper end of a rate is wrong.

    Args:
        false_alarms: interval of the rate of false alarms.
        misses: interval of the rate of misses.
    """
    return max(0.0, -float(ndtri(false_alarms.high)) - float(ndtri(misses.high)))


def deviation_interval(values: Floats, *, miss: float) -> Interval:
    """Return the standard deviation of zero-mean Gaussian noise.

    Args:
        values: the noise (n,); the relative standard error is 1 / √(2 n).
        miss: probability that an end is wrong, the same for both ends.
    """
    if values.size == 0:
        return Interval(math.nan, 0.0, math.inf)
    estimate = math.sqrt(float(np.mean(np.square(values))))
    margin = -float(ndtri(miss)) / math.sqrt(2.0 * values.size)
    return Interval(estimate, estimate * (1.0 - margin), estimate * (1.0 + margin))


def known_deviation_mean_interval(values: Floats, deviation: float, *, miss: float) -> Interval:
    """Return the mean of values with a known standard deviation.

    Args:
        values: the sample (n,).
        deviation: standard deviation of a value, in the unit of the values.
        miss: probability that an end is wrong, the same for both ends.
    """
    if values.size == 0:
        return Interval(math.nan, -math.inf, math.inf)
    estimate = float(values.mean())
    margin = -float(ndtri(miss)) * deviation / math.sqrt(values.size)
    return Interval(estimate, estimate - margin, estimate + margin)


def correlation_interval(one: Floats, other: Floats, *, miss: float) -> Interval:
    """Return the correlation of two samples of noise.

    Args:
        one: the first sample (n,).
        other: the second (n,); for independent samples, the standard error is 1 / √n.
        miss: probability that an end is wrong, the same for both ends.
    """
    if one.size == 0:
        return Interval(math.nan, -1.0, 1.0)
    estimate = float(np.vdot(one, other)) / math.sqrt(
        max(float(np.vdot(one, one)) * float(np.vdot(other, other)), 1e-300)
    )
    margin = -float(ndtri(miss)) / math.sqrt(one.size)
    return Interval(estimate, estimate - margin, estimate + margin)

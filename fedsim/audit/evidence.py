"""What counts of an attacker's hits and misses prove, and what a sample of noise says of its size.

All intervals are exact or nearly so, and none assumes that the mechanism is what it claims to be.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, ndtri

from fedsim.accountant.arrays import Floats


@dataclass(frozen=True)
class Interval:
    """A figure and where the true one lies, with the confidence asked for."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Tell whether a value lies outside."""
        return not self.low <= value <= self.high


def rate_interval(hits: int, trials: int, *, miss: float) -> Interval:
    """Return the interval of Clopper and Pearson (1934) of a probability.

    Args:
        hits: how often it happened, 0 to `trials`.
        trials: independent ones; of none, nothing is known.
        miss: probability that each end is wrong.
    """
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    low = float(betaincinv(hits, trials - hits + 1, miss)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1.0 - miss)) if hits < trials else 1.0
    return Interval(hits / trials, low, high)


def gdp_lower_bound(wrong_alarms: Interval, misses: Interval) -> float:
    """Return μ that the error rates of an attack prove: the release is not μ'-GDP for μ' < μ.

    A release that is μ-GDP lets no attack do better than telling N(0, 1) from N(μ, 1), for which
    Φ⁻¹(1 − false alarms) + Φ⁻¹(1 − misses) ≤ μ (Dong, Roth, Su 2022, arXiv:1905.02383; as an audit
    Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: above the true μ only if the upper end of a rate is wrong.
    """
    return max(0.0, -float(ndtri(wrong_alarms.high)) - float(ndtri(misses.high)))


def deviation_interval(values: Floats, *, miss: float) -> Interval:
    """Return the standard deviation about zero of Gaussian noise, relative error 1 / √(2 n)."""
    if values.size == 0:
        return Interval(math.nan, 0.0, math.inf)
    found = math.sqrt(float(np.mean(np.square(values))))
    room = -float(ndtri(miss)) / math.sqrt(2.0 * values.size)
    return Interval(found, found * (1.0 - room), found * (1.0 + room))


def known_deviation_mean_interval(values: Floats, deviation: float, *, miss: float) -> Interval:
    """Return the mean of values of a known standard deviation."""
    if values.size == 0:
        return Interval(math.nan, -math.inf, math.inf)
    found = float(values.mean())
    room = -float(ndtri(miss)) * deviation / math.sqrt(values.size)
    return Interval(found, found - room, found + room)


def correlation_interval(one: Floats, other: Floats, *, miss: float) -> Interval:
    """Return the correlation of two samples of noise; of independent ones it is about 1 / √n."""
    if one.size == 0:
        return Interval(math.nan, -1.0, 1.0)
    found = float(np.vdot(one, other)) / math.sqrt(
        max(float(np.vdot(one, one)) * float(np.vdot(other, other)), 1e-300)
    )
    room = -float(ndtri(miss)) / math.sqrt(one.size)
    return Interval(found, found - room, found + room)

"""Confidence intervals for the error rates of an attack and for the distribution of noise.

No interval assumes that the mechanism is as claimed. All intervals are exact, except those of
correlation coefficients, which are approximate. `miss` is the probability that an end of an
interval is wrong, the same for both ends, or that a bound is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, gammainccinv, gammaincinv, ndtr, ndtri

from fedsim.accountant.checks import Floats


@dataclass(frozen=True)
class Interval:
    """An estimate of a value, with the confidence interval from `low` to `high`."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether a value lies outside the interval."""
        return not self.low <= value <= self.high


def rate_interval(hits: int, trials: int, *, miss: float) -> Interval:
    """Return the Clopper-Pearson interval (1934) of a probability, from a number of successes."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    low = float(betaincinv(hits, trials - hits + 1, miss)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1.0 - miss)) if hits < trials else 1.0
    return Interval(hits / trials, low, high)


def gdp_lower_bound(false_alarms: Interval, misses: Interval) -> float:
    """Return a lower bound on the Gaussian-DP parameter μ from an attack's error rates.

    No attack on a μ-GDP release beats the test of N(0, 1) against N(μ, 1), so
    Φ⁻¹(1 − false alarms) + Φ⁻¹(1 − misses) ≤ μ (Dong, Roth, Su 2022, arXiv:1905.02383; as an audit
    Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: the bound exceeds the true μ only if the upper end of a rate is wrong.
    """
    return max(0.0, -float(ndtri(false_alarms.high)) - float(ndtri(misses.high)))


def shift_lower_bound(
    noise: Floats, shift: float, thresholds: Sequence[float], *, miss: float
) -> float:
    """Return a lower bound on the Gaussian-DP parameter μ of noise added to 0 or to `shift`.

    An attack says "present" above a threshold t. Its false alarms have probability P(noise > t) and
    its misses P(noise ≤ t − shift): rates of one ascending sample of any noise.

    Guarantee: the bound exceeds the true μ with probability at most `miss`, if the values are
    independent draws of the noise, and the thresholds independent of them.
    """
    end, best, n = miss / (2 * max(1, len(thresholds))), 0.0, noise.size
    for threshold in thresholds:
        alarms = n - int(np.searchsorted(noise, threshold, side="right"))
        misses = int(np.searchsorted(noise, threshold - shift, side="right"))
        rates = (rate_interval(count, n, miss=end) for count in (alarms, misses))
        best = max(best, gdp_lower_bound(*rates))
    return best


def run_lower_bound(
    outside: Floats, inside: Floats, thresholds: Sequence[float], *, delta: float, miss: float
) -> float:
    """Return a lower bound on ε from scores of whole runs, for any distribution of the noise.

    For an (ε, δ) release, P(alarm | present) ≤ e^ε P(alarm | absent) + δ, and likewise for the
    opposite event (Kairouz, Oh, Viswanath 2015; as an audit Jagielski et al. 2020).

    Guarantee: the bound exceeds the true ε with probability at most `miss`, if the scores are
    independent, and the thresholds independent of them.
    """
    end, best = miss / (2 * max(1, len(thresholds))), 0.0
    for threshold in thresholds:
        alarms = rate_interval(int((outside > threshold).sum()), outside.size, miss=end)
        hits = rate_interval(int((inside > threshold).sum()), inside.size, miss=end)
        for likely, rare in ((hits.low, alarms.high), (1.0 - alarms.high, 1.0 - hits.low)):
            if likely > delta:
                best = max(best, math.log((likely - delta) / rare))
    return best


def deviation_interval(values: Floats, *, miss: float) -> Interval:
    """Return the standard deviation of zero-mean Gaussian noise, with a chi-square interval."""
    if values.size == 0:
        return Interval(math.nan, 0.0, math.inf)
    squares, half = float(np.vdot(values, values)), values.size / 2.0
    return Interval(
        math.sqrt(squares / values.size),
        math.sqrt(squares / (2.0 * float(gammainccinv(half, miss)))),
        math.sqrt(squares / (2.0 * float(gammaincinv(half, miss)))),
    )


def distance_to_normal(noise: Floats, deviation: float, *, miss: float) -> Interval:
    """Return the largest distance of the distribution function of ascending noise to N(0, σ²).

    The interval is that of Dvoretzky, Kiefer, Wolfowitz and Massart (1990), valid for any n. It is
    conservative if σ is estimated from the noise itself.
    """
    claimed = ndtr(noise / deviation)
    steps = np.arange(noise.size + 1) / noise.size
    distance = max(float((steps[1:] - claimed).max()), float((claimed - steps[:-1]).max()))
    margin = math.sqrt(math.log(2.0 / miss) / (2.0 * noise.size))
    return Interval(distance, max(0.0, distance - margin), min(1.0, distance + margin))


def correlation_interval(first: Floats, second: Floats, *, miss: float) -> Interval:
    """Return the correlation of two samples of n values, with an approximate interval.

    The standard error of the correlation of independent samples is 1 / √n.
    """
    if first.size == 0:
        return Interval(math.nan, -1.0, 1.0)
    squares = float(np.vdot(first, first)) * float(np.vdot(second, second))
    estimate = float(np.vdot(first, second)) / math.sqrt(max(squares, 1e-300))
    margin = -float(ndtri(miss)) / math.sqrt(first.size)
    return Interval(estimate, estimate - margin, estimate + margin)

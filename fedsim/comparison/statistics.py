"""Means over seeds with intervals, and paired differences between variants with tests.

There is one value for each seed, so intervals and tests are about chance between seeds, not between
examples. Student's t intervals are exact for normally distributed values, approximate for others,
and wide for few seeds. The paired t test assumes normal differences. The sign-flip test (Fisher
1935, The Design of Experiments, section 21) only assumes that, without an effect, each difference
is symmetric about zero. With n seeds, its p value is never below 2 / 2^n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
MAX_FLIPPED_PAIRS = 20  # seeds up to which all 2^n sign flips are enumerated

_TIE_TOLERANCE = 1e-12  # relative: the order of a sum may change its last digits


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval."""

    n: int
    mean: float
    sd: float | None  # with n - 1 in the denominator; None for a single value, like the interval
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedDifference:
    """The mean of `value - baseline` over the seeds that both variants have, with its tests.

    The p values are two-sided, and None for a single pair. The t test also needs some spread, and
    the exact sign-flip test at most `MAX_FLIPPED_PAIRS` pairs.
    """

    estimate: Estimate
    t_p: float | None
    sign_flip_p: float | None
    sign_flip_floor: float  # the smallest p value that is possible with these pairs
    seeds: tuple[int, ...] = ()
    holm_p: float | None = None  # `t_p` after Holm's correction for all variants

    def to_json(self) -> dict[str, Any]:
        """Return the entry `difference` of a variant in `comparison.json`."""
        return {
            "seeds": list(self.seeds),
            **vars(self.estimate),
            "t_p": self.t_p,
            "holm_p": self.holm_p,
            "sign_flip_p": self.sign_flip_p,
            "sign_flip_floor": self.sign_flip_floor,
        }


def t_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of one or more independent, finite values with its t interval.

    Guarantee: for independent normal values the interval covers their mean with probability
    `confidence`, whatever their variance.
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) == 1:
        return Estimate(1, mean, None, None, None)
    sd = float(array.std(ddof=1))
    half = float(stdtrit(len(array) - 1, (1 + confidence) / 2)) * sd / math.sqrt(len(array))
    return Estimate(len(array), mean, sd, mean - half, mean + half)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Return the mean of `values - baseline`, pair by pair, with interval and tests.

    Guarantee: if the differences are independent, normal and of mean zero, `t_p` is below p with
    probability p. The interval then misses zero with probability 1 - `CONFIDENCE`. If they are
    independent and symmetric about zero, `sign_flip_p` is at most p with probability at most p.
    """
    differences = np.subtract(values, baseline, dtype=np.float64)
    estimate = t_interval(differences.tolist())
    return PairedDifference(
        estimate=estimate,
        t_p=_t_test(estimate),
        sign_flip_p=sign_flip_test(differences),
        sign_flip_floor=2.0 ** (1 - len(differences)),
    )


def sign_flip_test(differences: NDArray[np.float64]) -> float | None:
    """Return the exact p value of the sign-flip test of n paired differences.

    It is the share of the 2^n choices of signs whose mean is at least as far from zero as the
    observed one; None for fewer than 2 or more than `MAX_FLIPPED_PAIRS` differences.
    """
    n = len(differences)
    if not 2 <= n <= MAX_FLIPPED_PAIRS:
        return None
    observed = abs(float(differences.sum()))
    slack = _TIE_TOLERANCE * float(np.abs(differences).sum())
    sums = np.zeros(1)  # of each choice of signs
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return int(np.count_nonzero(np.abs(sums) >= observed - slack)) / 2**n


def holm(p_values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return p values adjusted for multiple comparisons (Holm 1979), in order; None is not counted.

    Guarantee: if all adjusted values below p are called significant, the probability that one or
    more of these calls are wrong is at most p. The tests may depend on one another in any way.
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        adjusted[index] = largest
    return tuple(adjusted)


def largest_of(values: Sequence[float | None]) -> float | None:
    """Return the largest of the values; None if one of them is None, or if there are none."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _t_test(estimate: Estimate) -> float | None:
    if estimate.sd is None:
        return None
    if estimate.sd <= _TIE_TOLERANCE * abs(estimate.mean):  # equal differences, up to rounding
        return 1.0 if estimate.mean == 0 else None
    statistic = estimate.mean / (estimate.sd / math.sqrt(estimate.n))
    return float(2 * stdtr(estimate.n - 1, -abs(statistic)))

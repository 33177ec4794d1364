"""Classical amplification and composition of (epsilon, delta) pairs.

The functions serve teaching and comparison. Each is a proven bound inside the range that it
enforces, but none is tight for DP-SGD: account with `fedsim.accountant.PldAccountant`, or Rényi DP.

References:
    Dwork, Roth 2014, The Algorithmic Foundations of Differential Privacy (D&R).
    Dwork, Rothblum, Vadhan 2010, Boosting and Differential Privacy (DRV).
    Kairouz, Oh, Viswanath 2015, arXiv:1311.0776 (KOV).
    Balle, Barthe, Gaboardi 2018, arXiv:1807.01647 (BBG).
    Li, Qardaji, Su 2012, arXiv:1101.2604.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.pld.privacy_profile import log_flips

_BLOCK = 1 << 16  # outcomes of randomised response per block: bounds memory at any count


def subsample_amplification(
    epsilon: float, delta: float, sampling_rate: float
) -> tuple[float, float]:
    """Return (log(1 + q (e^epsilon - 1)), q delta), the (ε, δ) after sampling at rate q.

    Guarantee: the sampled mechanism is DP with this pair in two cases, if `epsilon` and `delta`
    hold for the same adjacency:

    * Poisson sampling at rate q, adding or removing an example (Li, Qardaji, Su 2012; Theorem 8 of
      Balle, Barthe, Gaboardi 2018, BBG);
    * fixed-size sampling without replacement of m of n examples, q = m/n, replacing an example (BBG
      Theorem 9). With clipping norm C the sensitivity is 2C in this case, so a Gaussian has half
      the noise multiplier.

    The pair does not hold for Poisson sampling with replaced examples, sampling with replacement
    (BBG Theorem 10 differs), or shuffling. It is not tight under composition.

    Args:
        epsilon: ε of the mechanism on the sample, >= 0.
        delta: δ of the mechanism on the sample, in [0, 1].
        sampling_rate: the sampling rate q in [0, 1].

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.textbook.classical import subsample_amplification
        >>> epsilon, delta = subsample_amplification(1.0, 1e-5, 0.01)
        >>> round(epsilon, 4), round(delta, 9)
        (0.017, 1e-07)
    """
    epsilon = checks.non_negative("epsilon", epsilon)
    delta = checks.probability("delta", delta)
    q = checks.probability("sampling_rate", sampling_rate)
    if q in (0.0, 1.0):
        return q * epsilon, q * delta
    if epsilon < 700.0:  # e^epsilon is a float
        return math.log1p(q * math.expm1(epsilon)), q * delta
    return float(np.logaddexp(math.log1p(-q), math.log(q) + epsilon)), q * delta


def basic_composition(epsilons: Sequence[float], deltas: Sequence[float]) -> tuple[float, float]:
    """Return the sum of the epsilons and the sum of the deltas, at most 1.

    Guarantee: adaptive releases, each (epsilons[i], deltas[i])-DP, jointly satisfy the pair (Dwork,
    Roth 2014, Theorem 3.16).

    Args:
        epsilons: epsilon of each release, >= 0.
        deltas: delta of each release, in [0, 1]; of the same length.

    Raises:
        ValueError: the lists differ in length, or a value is outside its range (epsilons >= 0,
            deltas in [0, 1]).

    Example:
        >>> from fedsim.accountant.textbook.classical import basic_composition
        >>> basic_composition([0.5, 0.25], [1e-6, 0.0])
        (0.75, 1e-06)
    """
    if len(epsilons) != len(deltas):
        raise ValueError(
            "epsilons and deltas must have the same length, "
            f"got {len(epsilons)} and {len(deltas)} values"
        )
    total_epsilon = math.fsum(checks.non_negative("epsilons", value) for value in epsilons)
    total_delta = math.fsum(checks.probability("deltas", value) for value in deltas)
    return total_epsilon, min(1.0, total_delta)


def advanced_composition(
    epsilon: float, delta: float, count: int, slack: float
) -> tuple[float, float]:
    """Return the (epsilon, delta) of T equal releases together, by advanced composition.

    With eps = `epsilon`, the result is
    (eps sqrt(2 T ln(1/slack)) + T eps (e^eps - 1), T delta + slack).

    Guarantee: `count` = T adaptive releases, each (epsilon, delta)-DP, jointly satisfy the pair
    (Dwork, Rothblum, Vadhan 2010; Dwork, Roth 2014, Theorem 3.20). The formula is as published; for
    large epsilon it is worse than `basic_composition`. `kov_composition` takes the smaller of both.

    Args:
        epsilon: ε of one release, >= 0.
        delta: δ of one release, in [0, 1].
        count: number of releases, T >= 0, whole.
        slack: the delta that the theorem adds to T times the delta of one release, in (0, 1).

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.textbook.classical import advanced_composition
        >>> epsilon, delta = advanced_composition(0.01, 0.0, 1000, 1e-5)
        >>> round(epsilon, 3), delta
        (1.618, 1e-05)
    """
    epsilon, delta, count, slack = _checked(epsilon, delta, count, slack)
    drift = count * epsilon * _expm1(epsilon)
    spread = epsilon * math.sqrt(2.0 * count * -math.log(slack))
    return spread + drift, min(1.0, count * delta + slack)


def kov_composition(epsilon: float, delta: float, count: int, slack: float) -> tuple[float, float]:
    """Return the (epsilon, delta) of T equal releases together by the composition theorem of KOV.

    This is Theorem 3.4 of Kairouz, Oh, Viswanath 2015. Let eps be the ε of one release and
    b = T eps (e^eps - 1)/(e^eps + 1). The joint epsilon is the smallest of three values: T eps,
    b + eps sqrt(2T ln(e + sqrt(T eps^2)/slack)) and b + eps sqrt(2T ln(1/slack)). The joint delta
    is 1 - (1 - delta)^T (1 - slack). Texts often give only the third value, which is valid but can
    be far above the first.

    Args are those of `advanced_composition`.

    Raises:
        ValueError: an argument is outside its range.
    """
    epsilon, delta, count, slack = _checked(epsilon, delta, count, slack)
    drift = count * epsilon * math.tanh(0.5 * epsilon)
    logs = (math.log(math.e + math.sqrt(count) * epsilon / slack), -math.log(slack))
    branches = [drift + epsilon * math.sqrt(2.0 * count * log) for log in logs]
    return min(count * epsilon, *branches), _total_delta(delta, count, slack)


def optimal_composition(epsilon: float, delta: float, count: int, target_delta: float) -> float:
    """Return the smallest epsilon of `count` releases together at `target_delta`.

    Guarantee: `count` adaptive releases, each (epsilon, delta)-DP, are jointly
    (result, target_delta)-DP. No bound that uses only epsilon and delta is smaller (Kairouz, Oh,
    Viswanath 2015, Theorem 3.3).

    Edge cases: the result is infinite if 1 - (1 - delta)^count alone exceeds `target_delta`.

    Args:
        epsilon: ε of one release, >= 0.
        delta: δ of one release, in [0, 1].
        count: number of releases, k >= 0, whole.
        target_delta: the joint δ, in (0, 1).

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.textbook.classical import optimal_composition
        >>> round(optimal_composition(0.01, 0.0, 1000, 1e-5), 3)
        1.198
    """
    epsilon, delta, count, _ = _checked(epsilon, delta, count, 0.5)
    target = checks.open_probability("target_delta", target_delta)
    if delta == 1.0 and count:
        return math.inf
    # 1 - (1 - target)/(1 - delta)^k, the part of the target that is left for epsilon.
    slack = -math.expm1(math.log1p(-target) - (count * math.log1p(-delta) if delta else 0.0))
    if slack < 0.0:
        return math.inf
    if epsilon == 0.0 or count == 0:
        return 0.0
    if slack == 0.0:
        return count * epsilon
    # delta falls as the target grows; i from 0 (the pure bound) upwards until it is too much.
    log_slack = math.log(slack)
    low, high = 0, count // 2 + 1  # delta at (k - 2 low) eps is enough, at (k - 2 high) eps not
    while high - low > 1:
        middle = (low + high) // 2
        if _log_response_delta(epsilon, count, (count - 2 * middle) * epsilon) <= log_slack:
            low = middle
        else:
            high = middle
    return _between(epsilon, count, low, log_slack)


def _between(epsilon: float, count: int, low: int, log_slack: float) -> float:
    """Return epsilon in ((k - 2 low - 2) eps, (k - 2 low) eps], where delta is linear in e^eps.

    delta = sum over l <= low of P[l] - e^target P[l] e^(-(k - 2l) eps).
    """
    flips = np.arange(low + 1.0)
    log_p = log_flips(flips, epsilon, count)
    top = (count - 2 * low) * epsilon
    # With target = top - x the bracket is 1 - e^(-x - 2 (low - l) eps): solve for e^-x.
    first = _log_sum(log_p)
    second = _log_sum(log_p - 2.0 * (low - flips) * epsilon)
    if log_slack >= first:
        return 0.0
    share = log_slack - first
    # log(1 - e^share), by the formula that keeps its digits.
    log_left = math.log1p(-math.exp(share)) if share < -0.7 else math.log(-math.expm1(share))
    log_ratio = (first - second) + log_left
    # Round up: at epsilon = 40 the last digit is worth 4e-15 of delta, more than 1e-6 of 1e-9.
    return max(0.0, min(top, math.nextafter(top + min(0.0, log_ratio), math.inf)))


def _log_response_delta(epsilon: float, count: int, target: float) -> float:
    """Return log of sum over l of P[l flips] (1 - e^(target - (k - 2l) eps))_+."""
    if epsilon == 0.0 or count * epsilon <= target:
        return -math.inf
    end = min(count + 1, math.ceil(0.5 * (count - target / epsilon)))
    parts = [-math.inf]
    for start in range(0, end, _BLOCK):
        flips = np.arange(start, min(end, start + _BLOCK), dtype=float)
        gap = (count - 2.0 * flips) * epsilon - target
        with np.errstate(divide="ignore"):  # a gap that rounds to 0 adds nothing
            log_gap = np.log(-np.expm1(-np.maximum(gap, 0.0)))
        parts.append(_log_sum(log_flips(flips, epsilon, count) + log_gap))
    return _log_sum(np.array(parts))


def _log_sum(values: Floats) -> float:
    return float(np.asarray(logsumexp(values)))


def _checked(
    epsilon: float, delta: float, count: int, slack: float
) -> tuple[float, float, int, float]:
    return (
        checks.non_negative("epsilon", epsilon),
        checks.probability("delta", delta),
        checks.whole_number("count", count),
        checks.open_probability("slack", slack),
    )


def _total_delta(delta: float, count: int, slack: float) -> float:
    """Return 1 - (1 - delta)^count (1 - slack)."""
    if slack >= 1.0 or (delta == 1.0 and count):
        return 1.0
    return -math.expm1((count * math.log1p(-delta) if delta else 0.0) + math.log1p(-slack))


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700.0 else math.inf

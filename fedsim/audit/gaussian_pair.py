"""ε between two Gaussian distributions: an estimate from scores with and without an example.

Estimates by Gaussian fits are those of Andrew et al. 2023 (arXiv:2302.03098). They are no bounds.
"""

import math
from itertools import pairwise

from scipy.special import log_ndtr

_STEPS = 100  # of bisection
_MOST_EPSILON = 1e6


def gaussian_pair_epsilon(shift: float, outside: float, inside: float, *, delta: float) -> float:
    """Return ε at δ of the pair N(0, outside²) and N(shift, inside²), in the worse direction.

    Args:
        shift: distance of the means.
        outside: standard deviation without the example, > 0.
        inside: standard deviation with it, > 0.
        delta: δ in (0, 1).
    """
    return max(
        _epsilon(shift, inside, outside, delta),
        _epsilon(shift, outside, inside, delta),
    )


def _epsilon(shift: float, p: float, q: float, delta: float) -> float:
    """Return ε of P = N(0, p²) over Q = N(shift, q²): the least with P(A) ≤ e^ε Q(A) + δ."""
    low, high = 0.0, 1.0
    if _delta(shift, p, q, low) <= delta:
        return 0.0
    while _delta(shift, p, q, high) > delta:
        high *= 2.0
        if high > _MOST_EPSILON:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _delta(shift, p, q, middle) > delta else (low, middle)
    return high


def _delta(shift: float, p: float, q: float, epsilon: float) -> float:
    """Return P(A) − e^ε Q(A) of the set A where log P(x) / Q(x) > ε, in closed form.

    The log ratio is a x² + b x + c, so A is a half-line, an interval or its complement.
    """
    a = 0.5 / q**2 - 0.5 / p**2
    b = -shift / q**2
    c = 0.5 * (shift / q) ** 2 + math.log(q / p) - epsilon
    edges = _roots(a, b, c)
    ends = [-math.inf, *edges, math.inf]
    total = 0.0
    for low, high in pairwise(ends):
        inner = _between(low, high)
        if (a * inner + b) * inner + c > 0.0:
            total += _mass(low, high, shift, p, q, epsilon)
    return total


def _roots(a: float, b: float, c: float) -> list[float]:
    """Return the real roots of a x² + b x + c, ascending, without cancellation."""
    square = b * b - 4.0 * a * c
    if square <= 0.0:
        return []
    stable = -0.5 * (b + math.copysign(math.sqrt(square), b))
    found = [c / stable] if stable else []
    return sorted([*found, stable / a] if a else found)


def _between(low: float, high: float) -> float:
    """Return a point inside an interval, of which one or both ends may be infinite."""
    if math.isinf(low):
        return 0.0 if math.isinf(high) else high - abs(high) - 1.0
    return low + abs(low) + 1.0 if math.isinf(high) else 0.5 * (low + high)


def _mass(low: float, high: float, shift: float, p: float, q: float, epsilon: float) -> float:
    """Return P − e^ε Q of an interval."""
    return math.exp(_log_interval(low / p, high / p)) - math.exp(
        epsilon + _log_interval((low - shift) / q, (high - shift) / q)
    )


def _log_interval(low: float, high: float) -> float:
    """Return log(Φ(high) − Φ(low)), precise in both tails."""
    if low > 0.0:
        low, high = -high, -low
    upper, lower = float(log_ndtr(high)), float(log_ndtr(low))
    return upper + math.log1p(-math.exp(lower - upper)) if upper > lower else -math.inf

"""The least noise at which a client's planned releases stay within a target ε."""

import math
from collections.abc import Callable

TOLERANCE = 1e-4  # how far below the target ε may stay

_LEAST, MOST_NOISE = 1e-2, 1e6  # outside, noise protects nobody, or leaves no signal


def least_noise(epsilon: Callable[[float], float], target: float) -> float:
    """Return a noise multiplier z with target − `TOLERANCE` ≤ epsilon(z) ≤ target.

    The lower bound fails, towards more noise, where epsilon jumps over the interval.

    Args:
        epsilon: ε as a function of z; falling.
        target: > 0.

    Raises:
        ValueError: not even the most noise is enough, or the least is more than enough.
    """
    low, high, spent = _bracket(epsilon, target)
    while spent < target - TOLERANCE and high / low > 1.0 + 1e-12:
        middle = math.sqrt(low * high)
        found = epsilon(middle)
        if found > target:
            low = middle
        else:
            high, spent = middle, found
    return high


def _bracket(epsilon: Callable[[float], float], target: float) -> tuple[float, float, float]:
    """Return too little noise, enough noise, and the ε of the latter; a factor 2 apart."""
    high = 1.0
    while (spent := epsilon(high)) > target:
        high *= 2.0
        if high > MOST_NOISE:
            raise ValueError(
                f"even noise_multiplier={high / 2:g} spends epsilon {spent:.3g}; raise "
                "target_epsilon or delta, or take fewer steps or smaller lots"
            )
    low = high / 2.0
    while (found := epsilon(low)) <= target:
        low, high, spent = low / 2.0, low, found
        if low < _LEAST:
            raise ValueError(
                f"noise_multiplier={high:g}, which is no noise to speak of, spends epsilon "
                f"{spent:.3g}; lower target_epsilon or delta"
            )
    return low, high, spent

"""The largest count, or the least noise, whose epsilon stays within a limit."""

import math
from collections.abc import Callable

Point = tuple[float, float]  # (x, its epsilon)

MOST = 10**12  # means "any number": no schedule is longer


def largest_count(cost: Callable[[int], float], limit: float, start: int = 1) -> int:
    """Return n in [0, `MOST`] with cost(n) <= limit < cost(n + 1).

    n is 0 if even cost(1) is above the limit, and `MOST` if cost(MOST) is not. Where cost does not
    grow everywhere there may be several such n; this is one of them.

    Args:
        cost: of n >= 1 releases.
        limit: finite.
        start: a guess of the answer, >= 1.
    """
    low, high = (0, 0.0), (MOST + 1, math.inf)  # cost(low) <= limit < cost(high)
    n, stride = min(max(1, start), MOST), 1
    while high[0] - low[0] > 1:
        value = cost(n)
        if value <= limit:
            low = (n, value)
        else:
            high = (n, value)
        if low[0] == 0 or high[0] > MOST:  # no bracket yet: gallop away from the guess
            step = max(1, start * stride // 8)
            n = min(n + step, MOST) if low[0] else max(n - step, 1)
            stride *= 2
        else:
            n = _between(low, high, limit, bisect=stride % 3 == 0)
            stride += 1
    return low[0]


def _between(low: tuple[int, float], high: tuple[int, float], limit: float, *, bisect: bool) -> int:
    """Return a count strictly between, by interpolation: cost is about a power of the count.

    Occasional bisection makes the bracket shrink for every curve.
    """
    share = 0.5
    if not bisect and 0.0 < low[1] < limit < high[1] < math.inf:
        share = math.log(limit / low[1]) / math.log(high[1] / low[1])
    ratio = high[0] / low[0]
    n = round(low[0] * ratio**share) if ratio > 1.01 else round(low[0] + share * (high[0] - low[0]))
    return min(max(n, low[0] + 1), high[0] - 1)


def solve_falling(
    epsilon: Callable[[float], float], target: float, tolerance: float, low: Point, high: Point
) -> float:
    """Return x between `low` and `high` whose epsilon is in [target - tolerance, target].

    Edge cases: where epsilon jumps over that range, x right above the jump (to 1e-12 relative).

    Args:
        epsilon: of x > 0; falls with x.
        target: > 0.
        tolerance: > 0; at most 1 % of the target is used, which keeps small targets meaningful.
        low: a point with epsilon above the target.
        high: a point with epsilon at or below it; its x is larger.
    """
    tolerance = min(tolerance, 0.01 * target)
    aim = target - 0.5 * tolerance
    for iteration in range(200):
        if high[1] >= target - tolerance or high[0] / low[0] < 1.0 + 1e-12:
            break
        x = math.sqrt(low[0] * high[0])
        # Between two finite points epsilon is close to a power of x: interpolate its logarithm.
        # Every third step is a plain bisection, so the bracket shrinks for every curve.
        if iteration % 3 != 2 and high[1] > 0.0 and math.isfinite(low[1]):
            share = math.log(low[1] / aim) / math.log(low[1] / high[1])
            x = low[0] * (high[0] / low[0]) ** min(max(share, 0.01), 0.99)
        point = (x, epsilon(x))
        low, high = (point, high) if point[1] > target else (low, point)
    return high[0]

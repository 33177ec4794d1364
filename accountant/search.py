"""Searches for the largest number of releases, or the least noise, within an epsilon limit."""

import math
from collections.abc import Callable

from fedsim.accountant import checks

Point = tuple[float, float]  # (x, its epsilon)

MOST = 10**12  # means "any number": no schedule is longer
# Noise multipliers below give no protection, above leave no signal.
LEAST_NOISE, MOST_NOISE = 1e-2, 1e6
NOISE_TOLERANCE = 1e-4  # in epsilon


def largest_count(cost: Callable[[int], float], limit: float, start: int = 1) -> int:
    """Return the number of releases n in [0, `MOST`] with cost(n) <= limit < cost(n + 1).

    `MOST` is 10^12. n is 0 if even cost(1) is above the limit, and `MOST` if cost(MOST) is not
    above it. If cost does not grow everywhere, several n qualify and one of them is returned.

    Args:
        cost: function that returns the cost (such as epsilon) of n >= 1 releases.
        limit: largest cost, finite.
        start: first guess of n, >= 1; it changes the speed of the search only.
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
    """Return a count strictly between `low` and `high`, as if cost were a power of the count.

    Occasional bisection makes the bracket shrink for every curve.
    """
    share = 0.5
    if not bisect and 0.0 < low[1] < limit < high[1] < math.inf:
        share = math.log(limit / low[1]) / math.log(high[1] / low[1])
    ratio = high[0] / low[0]
    n = round(low[0] * ratio**share) if ratio > 1.01 else round(low[0] + share * (high[0] - low[0]))
    return min(max(n, low[0] + 1), high[0] - 1)


def least_noise(
    epsilon: Callable[[float], float],
    target: float,
    *,
    tolerance: float = NOISE_TOLERANCE,
    interpolate: bool = True,
    schedule: str = "the target",
) -> float:
    """Return a noise multiplier z with target - tolerance <= epsilon(z) <= target.

    Edge cases: where epsilon jumps over that range, z is right above the jump.

    Args:
        epsilon: function that returns epsilon at a noise multiplier z > 0; falls with z.
        target: largest epsilon, > 0.
        tolerance: how far below the target epsilon may stay, > 0.
        interpolate: whether to interpolate; see `solve_falling`. The choice changes the last digits
            of z, which ledgers store, so a caller must always make the same choice.
        schedule: description of the target and of its schedule for error messages.

    Raises:
        ValueError: the target is not > 0, even the largest noise spends too much, or even the
            smallest stays below the target.
    """
    target = checks.positive("target_epsilon", target)
    low, high = _noise_bracket(epsilon, target, schedule)
    return solve_falling(epsilon, target, tolerance, low, high, interpolate=interpolate)


def _noise_bracket(
    epsilon: Callable[[float], float], target: float, schedule: str
) -> tuple[Point, Point]:
    """Return two points a factor 2 apart: epsilon is above the target at the first only."""
    noise = 1.0
    point = (noise, epsilon(noise))
    above = point[1] > target
    while True:
        noise = noise * 2.0 if above else noise / 2.0
        if noise > MOST_NOISE:
            raise ValueError(
                f"{schedule} cannot be met: even noise_multiplier={point[0]:g} spends epsilon "
                f"{point[1]:.3g}; raise target_epsilon or delta, or lower sampling_rate or steps"
            )
        if noise < LEAST_NOISE:
            raise ValueError(
                f"{schedule} needs almost no noise: noise_multiplier={point[0]:g} spends "
                f"epsilon {point[1]:.3g}; lower target_epsilon or delta"
            )
        previous, point = point, (noise, epsilon(noise))
        if (point[1] > target) != above:
            return (previous, point) if above else (point, previous)


def solve_falling(
    epsilon: Callable[[float], float],
    target: float,
    tolerance: float,
    low: Point,
    high: Point,
    *,
    interpolate: bool = True,
) -> float:
    """Return a point x between `low` and `high` with epsilon in [target - tolerance, target].

    Edge cases: where epsilon jumps over that range, x is right above the jump (to 1e-12 relative).

    Args:
        epsilon: function that returns epsilon at x > 0; falls with x.
        target: largest epsilon, > 0.
        tolerance: how far below the target epsilon may stay, > 0. Interpolation uses at most 1 %
            of the target, which keeps small targets meaningful.
        low: a pair (x, epsilon) with epsilon above the target.
        high: a pair (x, epsilon) with larger x and epsilon at or below the target.
        interpolate: whether to interpolate, which takes fewer steps. Otherwise every step is a
            bisection.
    """
    if interpolate:
        tolerance = min(tolerance, 0.01 * target)
    aim = target - 0.5 * tolerance
    for iteration in range(200):
        if high[1] >= target - tolerance or high[0] / low[0] < 1.0 + 1e-12:
            break
        x = math.sqrt(low[0] * high[0])
        # Between two finite points epsilon is close to a power of x: interpolate its logarithm.
        # Every third step is a plain bisection, so the bracket shrinks for every curve.
        if interpolate and iteration % 3 != 2 and high[1] > 0.0 and math.isfinite(low[1]):
            share = math.log(low[1] / aim) / math.log(low[1] / high[1])
            x = low[0] * (high[0] / low[0]) ** min(max(share, 0.01), 0.99)
        point = (x, epsilon(x))
        low, high = (point, high) if point[1] > target else (low, point)
    return high[0]


def root_between(
    f: Callable[[float], float], low: float, high: float, *, absolute: float, relative: float
) -> float:
    """Return a root of f between two points by Brent's method.

    The result has the same bits as that of scipy's brentq. The import of scipy's solvers would take
    longer than the search itself.

    Args:
        f: a continuous function with opposite signs at `low` and `high`.
        low: one end of the interval.
        high: the other end of the interval.
        absolute: absolute tolerance of the root.
        relative: tolerance of the root relative to its size, added to `absolute`.
    """
    a, b, c = low, high, low  # the previous point, the best point, and a point of opposite sign
    of_a, of_b, of_c = f(a), f(b), 0.0
    before = step = 0.0
    if of_a == 0.0:
        return a
    for _ in range(100):
        if of_a != 0.0 and of_b != 0.0 and (of_a < 0.0) != (of_b < 0.0):
            c, of_c = a, of_a
            before = step = b - a
        if abs(of_c) < abs(of_b):
            a, b, c = b, c, b
            of_a, of_b, of_c = of_b, of_c, of_b
        least, half = (absolute + relative * abs(b)) / 2.0, (c - b) / 2.0
        if of_b == 0.0 or abs(half) < least:
            return b
        before, step, last = half, half, (before, step)
        if abs(last[0]) > least and abs(of_b) < abs(of_a):
            if a == c:
                tried = -of_b * (b - a) / (of_b - of_a)
            else:
                to_a, to_c = (of_a - of_b) / (a - b), (of_c - of_b) / (c - b)
                tried = -of_b * (of_c * to_c - of_a * to_a) / (to_c * to_a * (of_c - of_a))
            if 2.0 * abs(tried) < min(abs(last[0]), 3.0 * abs(half) - least):
                before, step = last[1], tried
        a, of_a = b, of_b
        b += step if abs(step) > least else math.copysign(least, half)
        of_b = f(b)
    return b

"""Calibration: the least noise that keeps a schedule within a target epsilon."""

import math
from collections.abc import Callable
from functools import lru_cache

from fedsim.accountant import checks
from fedsim.accountant.accountants import AccountantName, make_accountant
from fedsim.accountant.events import Gaussian, PoissonSampled

_LEAST, _MOST = 1e-2, 1e6  # noise multipliers outside protect nobody, or leave no signal


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: AccountantName = "pld",
    tolerance: float = 1e-4,
) -> float:
    """Returns a noise multiplier z at which the schedule spends at most `target_epsilon`.

    Guarantee: `steps` Poisson-sampled Gaussian steps with the returned z have
    get_epsilon(delta) <= target_epsilon by the same accountant, and at least
    target_epsilon - tolerance. The second half can fail, towards more noise, where the PLD
    accountant has to coarsen its grid (epsilon in the hundreds) or answers by RDP instead.

    The result depends on the arguments only, and is remembered.

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling_rate: inclusion probability of each example, in (0, 1].
        steps: number of steps, >= 1.
        accountant: "pld" or "rdp".
        tolerance: how far below the target the spent epsilon may stay, > 0.

    Raises:
        ValueError: an argument is outside its range, or there is nothing to calibrate: even
            noise 1e6 spends too much, even 1e-2 stays below the target, or delta covers the
            whole probability that an example is ever sampled.
    """
    rate = checks.probability("sampling_rate", sampling_rate)
    count = checks.whole_number("steps", steps)
    if rate == 0.0 or count == 0:
        raise ValueError(
            f"sampling_rate and steps must be > 0 to calibrate noise, got {rate!r} and {count!r}"
        )
    target = checks.positive("target_epsilon", target_epsilon)
    delta = checks.open_probability("delta", delta)
    exposure = -math.expm1(count * math.log1p(-rate)) if rate < 1.0 else 1.0
    if delta >= exposure:
        raise ValueError(
            f"delta must be below {exposure:.3g}, the probability that an example is ever sampled "
            f"with sampling_rate={rate!r} and steps={count!r}, got {delta!r}"
        )
    return _calibrate(
        target,
        delta,
        rate,
        count,
        accountant,
        checks.positive("tolerance", tolerance),
    )


@lru_cache(maxsize=4096)
def _calibrate(
    target: float, delta: float, rate: float, steps: int, name: AccountantName, tolerance: float
) -> float:
    def epsilon(noise: float) -> float:
        event = PoissonSampled(rate, Gaussian(noise))
        return make_accountant(name).compose(event, steps).get_epsilon(delta)

    low, high = _bracket(epsilon, target, delta, rate, steps)
    return _solve(epsilon, target, tolerance, low, high)


Point = tuple[float, float]  # (noise multiplier, its epsilon)


def _bracket(
    epsilon: Callable[[float], float], target: float, delta: float, rate: float, steps: int
) -> tuple[Point, Point]:
    """Returns points with epsilon above the target (less noise) and at or below it (more)."""
    what = f"target_epsilon={target!r} at delta={delta!r}, sampling_rate={rate!r}, steps={steps!r}"
    noise = 1.0
    point = (noise, epsilon(noise))
    above = point[1] > target
    while True:
        noise = noise * 2.0 if above else noise / 2.0
        if noise > _MOST:
            raise ValueError(
                f"{what} cannot be met: even noise_multiplier={point[0]:g} spends epsilon "
                f"{point[1]:.3g}; raise target_epsilon or delta, or lower sampling_rate or steps"
            )
        if noise < _LEAST:
            raise ValueError(
                f"{what} needs no noise to speak of: noise_multiplier={point[0]:g} spends epsilon "
                f"{point[1]:.3g}; lower target_epsilon or delta"
            )
        previous, point = point, (noise, epsilon(noise))
        if (point[1] > target) != above:
            return (previous, point) if above else (point, previous)


def _solve(
    epsilon: Callable[[float], float], target: float, tolerance: float, low: Point, high: Point
) -> float:
    """Returns a noise multiplier whose epsilon lies in [target - tolerance, target]."""
    tolerance = min(tolerance, 0.01 * target)  # keeps small targets meaningful
    aim = target - 0.5 * tolerance
    for iteration in range(200):
        if high[1] >= target - tolerance or high[0] / low[0] < 1.0 + 1e-12:
            break
        noise = math.sqrt(low[0] * high[0])
        # Between two finite points epsilon is close to a power of z: interpolate its logarithm.
        # Every third step is a plain bisection, so the bracket shrinks whatever the curve.
        if iteration % 3 != 2 and high[1] > 0.0 and math.isfinite(low[1]):
            share = math.log(low[1] / aim) / math.log(low[1] / high[1])
            noise = low[0] * (high[0] / low[0]) ** min(max(share, 0.01), 0.99)
        point = (noise, epsilon(noise))
        low, high = (point, high) if point[1] > target else (low, point)
    return high[0]

"""Search for the noise multiplier, number of steps or sampling rate that meets a target epsilon.

Each search computes epsilon with the accountant that the caller names. By this accountant the
result never spends more than the target.
"""

import math
from functools import lru_cache

from fedsim.accountant import checks
from fedsim.accountant.accountants import AccountantChoice, make_accountant
from fedsim.accountant.events import Adjacency, Gaussian, PoissonSampled, check_adjacency
from fedsim.accountant.privacy_filter import PrivacyFilter
from fedsim.accountant.search import MOST, NOISE_TOLERANCE, least_noise, solve_falling
from fedsim.core.formatting import epsilon_text

_LEAST_RATE = 1e-12  # below, an example is never sampled in any run


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: AccountantChoice = "pld",
    adjacency: Adjacency = "zero_out",
    tolerance: float = NOISE_TOLERANCE,
) -> float:
    """Return a noise multiplier z at which the schedule spends at most `target_epsilon`.

    Guarantee: `steps` Poisson-sampled Gaussian steps with the returned z have
    get_epsilon(delta) <= target_epsilon by the same accountant, and at least
    target_epsilon - tolerance. Epsilon can be lower still, and z larger than needed, in two cases:
    the PLD accountant rounds privacy losses to a coarser grid (epsilon in the hundreds), or it uses
    RDP instead.

    The result depends on the arguments alone and is cached.

    Args:
        target_epsilon: largest epsilon to spend, > 0.
        delta: the delta of that epsilon, in (0, 1).
        sampling_rate: inclusion probability of each example, in (0, 1].
        steps: number of steps, >= 1.
        accountant: "pld", "rdp" or "moments", or `RdpOrders`.
        adjacency: "zero_out", "add_remove" or "replace_one".
        tolerance: how far below the target the spent epsilon may stay, > 0.

    Raises:
        ValueError: an argument is outside its range, or there is nothing to calibrate: even z = 1e6
            spends too much, even z = 1e-2 stays below the target, or delta is at least the
            probability that an example is ever sampled.

    Example:
        >>> from fedsim.accountant import calibrate_noise_multiplier
        >>> z = calibrate_noise_multiplier(
        ...     target_epsilon=8.0, delta=1e-5, sampling_rate=0.01, steps=10_000
        ... )
        >>> round(z, 3)
        0.883
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
    tolerance = checks.positive("tolerance", tolerance)
    adjacency = check_adjacency(adjacency)
    return _noise_multiplier(target, delta, rate, count, accountant, adjacency, tolerance)


def calibrate_steps(
    *,
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    noise_multiplier: float,
    accountant: AccountantChoice = "pld",
    adjacency: Adjacency = "zero_out",
) -> int:
    """Return the largest number of steps that spends at most `target_epsilon`.

    Guarantee: by the same accountant, the returned number of Poisson-sampled Gaussian steps has
    get_epsilon(delta) <= target_epsilon, and one step more exceeds the target.

    Args:
        target_epsilon: largest epsilon to spend, > 0.
        delta: the delta of that epsilon, in (0, 1).
        sampling_rate: inclusion probability of each example, in (0, 1].
        noise_multiplier: noise standard deviation over the clip norm, z > 0.
        accountant: "pld", "rdp" or "moments", or `RdpOrders`.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        ValueError: an argument is outside its range, a single step spends too much, or even
            10^12 steps stay below the target.

    Example:
        >>> from fedsim.accountant import calibrate_steps
        >>> calibrate_steps(
        ...     target_epsilon=2.0, delta=1e-5, sampling_rate=0.01, noise_multiplier=1.0
        ... )
        1202
    """
    budget = PrivacyFilter(target_epsilon, delta, accountant=accountant, adjacency=adjacency)
    rate = checks.probability("sampling_rate", sampling_rate)
    if rate == 0.0:
        raise ValueError("sampling_rate must be > 0 to calibrate steps, got 0.0")
    noise = checks.positive("noise_multiplier", noise_multiplier)
    steps = budget.max_count(PoissonSampled(rate, Gaussian(noise)))
    schedule = (
        f"target_epsilon={budget.target_epsilon!r} at delta={budget.delta!r}, "
        f"sampling_rate={rate!r}, noise_multiplier={noise!r}"
    )
    if steps == 0:
        spent = _epsilon(accountant, adjacency, budget.delta, rate, noise, 1)
        raise ValueError(
            f"{schedule} cannot be met: a single step spends epsilon {epsilon_text(spent)}; raise "
            "target_epsilon, delta or noise_multiplier, or lower sampling_rate"
        )
    if steps == MOST:
        raise ValueError(
            f"{schedule} allows any number of steps: even {MOST:.0e} stay below it; lower "
            "target_epsilon, delta or noise_multiplier, or raise sampling_rate"
        )
    return steps


def calibrate_sampling_rate(
    *,
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    steps: int,
    accountant: AccountantChoice = "pld",
    adjacency: Adjacency = "zero_out",
    tolerance: float = NOISE_TOLERANCE,
) -> float:
    """Return nearly the largest sampling rate that spends at most `target_epsilon`.

    Guarantee: by the same accountant, `steps` Poisson-sampled Gaussian steps at the returned rate
    have get_epsilon(delta) <= target_epsilon, and at least target_epsilon - tolerance. Epsilon can
    be lower still in the two cases that `calibrate_noise_multiplier` names.

    Edge cases: the result is 1 if even sampling every example stays below the target.

    Args:
        target_epsilon: largest epsilon to spend, > 0.
        delta: the delta of that epsilon, in (0, 1).
        noise_multiplier: noise standard deviation over the clip norm, z > 0.
        steps: number of steps, >= 1.
        accountant: "pld", "rdp" or "moments", or `RdpOrders`.
        adjacency: "zero_out", "add_remove" or "replace_one".
        tolerance: how far below the target the spent epsilon may stay, > 0.

    Raises:
        ValueError: an argument is outside its range, or even a rate of 1e-12 spends too much.

    Example:
        >>> from fedsim.accountant import calibrate_sampling_rate
        >>> rate = calibrate_sampling_rate(
        ...     target_epsilon=2.0, delta=1e-5, noise_multiplier=1.0, steps=1000
        ... )
        >>> round(rate, 4)
        0.0109
    """
    target = checks.positive("target_epsilon", target_epsilon)
    delta = checks.open_probability("delta", delta)
    noise = checks.positive("noise_multiplier", noise_multiplier)
    count = checks.positive_whole_number("steps", steps)
    tolerance = checks.positive("tolerance", tolerance)

    def epsilon(inverse: float) -> float:  # of 1 / rate: falls, as it does with noise
        return _epsilon(accountant, adjacency, delta, 1.0 / inverse, noise, count)

    low = high = (1.0, epsilon(1.0))
    while high[1] > target:
        if high[0] * 4.0 > 1.0 / _LEAST_RATE:
            raise ValueError(
                f"target_epsilon={target!r} at delta={delta!r}, noise_multiplier={noise!r}, "
                f"steps={count!r} cannot be met: even sampling_rate={1.0 / high[0]:.1e} spends "
                f"epsilon {high[1]:.3g}; raise target_epsilon, delta or noise_multiplier"
            )
        low, high = high, (high[0] * 4.0, epsilon(high[0] * 4.0))
    if low == high:
        return 1.0
    return 1.0 / solve_falling(epsilon, target, tolerance, low, high)


def _epsilon(
    name: AccountantChoice,
    adjacency: Adjacency,
    delta: float,
    rate: float,
    noise: float,
    steps: int,
) -> float:
    event = PoissonSampled(rate, Gaussian(noise))
    return make_accountant(name, adjacency=adjacency).compose(event, steps).get_epsilon(delta)


@lru_cache(maxsize=4096)
def _noise_multiplier(
    target: float,
    delta: float,
    rate: float,
    steps: int,
    name: AccountantChoice,
    adjacency: Adjacency,
    tolerance: float,
) -> float:
    def epsilon(noise: float) -> float:
        return _epsilon(name, adjacency, delta, rate, noise, steps)

    schedule = (
        f"target_epsilon={target!r} at delta={delta!r}, sampling_rate={rate!r}, steps={steps!r}"
    )
    return least_noise(epsilon, target, tolerance=tolerance, schedule=schedule)

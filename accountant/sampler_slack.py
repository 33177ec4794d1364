"""Additions to ε and δ, called slack, which cover the error of the integer noise sampler.

The accountants assume noise rint(N(0, 2⁴⁸)): normal noise of standard deviation 2²⁴, rounded to
integers. The sampler `spline_integers` draws each value with a probability that differs by a factor
close to 1 (theorem and proof: docs/explain/proofs.md):

- for values within 4093 · 2¹⁶ (15.99 standard deviations) the ratio of the two probabilities is
  e^ℓ, where ℓ is at most 5e-8 in size and E ℓ² ≤ 1e-23;
- values outside, and the rounding of the sampler's table, have a probability of at most 2⁻¹⁸⁷ with
  the sampler and with the accountants' noise.

Take a mechanism that draws N values and is (ε, δ)-DP with the accountants' noise. Bernstein's
inequality for the sum of ℓ and two changes of measure show that with the sampler's noise and for
every δ₁ the mechanism is

    (ε + 2t, e^t δ + (1 + e^(ε + t)) (δ₁ + N 2⁻¹⁸⁷))-DP,
    t = N (E ℓ² + 2⁻¹⁸⁷) + sqrt(2 N E ℓ² ln(1/δ₁)) + (2/3) 5e-8 ln(1/δ₁).

N is always `MAX_DRAWS` = 10¹² in this module, so the slack does not grow with the number of steps.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from fedsim.accountant import checks

MAX_DRAWS = 10**12  # values of noise that one client may draw: 10⁶ parameters, 10⁶ steps
SHARE = 2.0**-14  # of δ that the slack may take; e^t - 1 is up to 0.8 of it

_MEAN_SQUARE = 1e-23  # of ℓ
_MAX_LOG_RATIO = 5e-8
_OUTSIDE = 2.0**-187


class Slack(NamedTuple):
    """The amounts that the error of the noise sampler adds to ε and δ of a guarantee.

    Attributes:
        epsilon: amount to add to the ε of the accountants; infinite if nothing can be proven.
        delta: amount to add to the δ of the accountants; 1 if nothing can be proven.
    """

    epsilon: float
    delta: float


def sampler_slack(epsilon: float, delta: float) -> Slack:
    """Return the slack: what the error of the noise sampler adds to the accountants' ε and δ.

    The accountants use δ (1 - SHARE) with SHARE = 2⁻¹⁴, so δ · SHARE remains for the sampler.

    Guarantee: let a mechanism be (epsilon, delta · (1 - SHARE))-DP with the ideal noise
    rint(N(0, 2⁴⁸)). If it draws its noise from the sampler `spline_integers` instead, at most
    MAX_DRAWS = 10¹² values, it is (epsilon + slack.epsilon, delta)-DP. slack.delta is at most
    delta · SHARE.

    Edge cases: an infinite epsilon has slack (0, 0). The slack is infinite if (1 + e^epsilon)
    MAX_DRAWS 2⁻¹⁸⁷ is close to delta · SHARE or above. This holds for epsilon above 79 at delta =
    1e-5, and above 55 at delta = 1e-15.

    Args:
        epsilon: the ε of the accountants at delta · (1 - SHARE), >= 0.
        delta: the δ of the whole guarantee, in (0, 1).

    Raises:
        ValueError: an argument is outside its range.
    """
    delta = checks.open_probability("delta", delta)
    if epsilon == math.inf:
        return Slack(0.0, 0.0)
    epsilon = checks.non_negative("epsilon", epsilon)
    if epsilon > _MAX_EPSILON:
        return _NOTHING_PROVEN
    failure = delta * _FAILURE_SHARE / (1.0 + math.exp(epsilon + 1.0))
    if failure == 0.0:
        return _NOTHING_PROVEN
    shift = _shift(failure)
    added = math.expm1(shift) * delta + _additive(epsilon + shift, failure)
    return Slack(2.0 * shift, added) if added <= delta * SHARE else _NOTHING_PROVEN


def epsilon_with_slack(get_epsilon: Callable[[float], float], delta: float) -> float:
    """Return the ε at `delta` of all releases, plus what the error of the noise sampler adds.

    Guarantee: let all releases be (get_epsilon(d), d)-DP for every d with the ideal noise
    rint(N(0, 2⁴⁸)). If they draw their noise from `spline_integers` instead, at most
    MAX_DRAWS = 10¹² values, they are (result, delta)-DP.

    Edge cases: without releases ε is 0; this case is recognised by an ε of 0 even at δ = 2⁻²⁰⁰. The
    result is infinite if the ε of the accountants is infinite, or if `sampler_slack` can prove
    nothing.

    Args:
        get_epsilon: function that returns the ε of the accountants at a δ in (0, 1); it never
            increases with δ.
        delta: the δ of the whole guarantee, in (0, 1).

    Raises:
        ValueError: `delta` is outside its range.
    """
    delta = checks.open_probability("delta", delta)
    epsilon = get_epsilon(delta * (1.0 - SHARE))
    if epsilon == 0.0 and get_epsilon(min(delta, _NEVER)) == 0.0:
        return 0.0
    return epsilon + sampler_slack(epsilon, delta).epsilon


def target_without_slack(target_epsilon: float, delta: float) -> tuple[float, float]:
    """Return the stricter (ε, δ) for the accountants that leaves room for the sampler's error.

    Guarantee: if all releases are (ε, δ)-DP for the returned pair, with the noise rint(N(0, 2⁴⁸))
    that the accountants assume, then `epsilon_with_slack` is at most `target_epsilon` at `delta`.

    Args:
        target_epsilon: the ε that must hold after the slack is added, > 0.
        delta: the δ of that ε, in (0, 1).

    Raises:
        ValueError: an argument is outside its range, or the sampler's error alone (the slack)
            exceeds the target.
    """
    epsilon = min(checks.positive("target_epsilon", target_epsilon), _MAX_EPSILON)
    # No slack is proven for very large ε: aim for a smaller ε there.
    while (slack := sampler_slack(epsilon, delta).epsilon) == math.inf and epsilon > 1.0:
        epsilon *= 0.99
    if epsilon <= slack:
        raise ValueError(
            f"target_epsilon must be above {slack:.3g}, which the sampler of noise may cost, got "
            f"{epsilon}"
        )
    return epsilon - slack, delta * (1.0 - SHARE)


def delta_with_slack(get_delta: Callable[[float], float], epsilon: float) -> float:
    """Return the δ at `epsilon` of all releases, plus what the error of the noise sampler adds.

    Guarantee: let all releases be (e, get_delta(e))-DP for every e >= 0 with the ideal noise
    rint(N(0, 2⁴⁸)). If they draw their noise from `spline_integers` instead, at most
    MAX_DRAWS = 10¹² values, they are (epsilon, result)-DP.

    Edge cases: without releases (δ is 0 at ε = 0) the result is 0; it is never above 1. The result
    uses the accountants' δ at ε - 2t, where 2t is the slack in ε. If ε < 2t, it uses
    the δ at 0 plus 2t - ε.

    Args:
        get_delta: function that returns the δ of the accountants at an ε >= 0; it never increases
            with ε.
        epsilon: the ε of the guarantee, >= 0, finite.

    Raises:
        ValueError: `epsilon` is outside its range.
    """
    epsilon = checks.non_negative("epsilon", epsilon)
    if get_delta(0.0) == 0.0:
        return 0.0
    if epsilon > _MAX_EPSILON:
        return 1.0
    # Any δ₁ is valid: take a small share of δ, and no less than the δ that N values add anyway.
    failure = max(
        float(get_delta(epsilon)) * _FAILURE_SHARE / (1.0 + math.exp(epsilon)), _ALL_OUTSIDE
    )
    shift = _shift(failure)
    inner = epsilon - 2.0 * shift
    delta = float(get_delta(max(inner, 0.0))) + max(-inner, 0.0)
    return min(1.0, math.exp(shift) * delta + _additive(epsilon - shift, failure))


def _shift(failure: float) -> float:
    """Return t of the module's formula, which the sum of ℓ exceeds with probability δ₁."""
    logarithm = -math.log(failure)
    mean = MAX_DRAWS * _MEAN_SQUARE + _ALL_OUTSIDE
    spread = math.sqrt(2.0 * MAX_DRAWS * _MEAN_SQUARE * logarithm)
    return mean + spread + 2.0 / 3.0 * _MAX_LOG_RATIO * logarithm


def _additive(exponent: float, failure: float) -> float:
    """Return the additive terms of δ, from both changes of measure."""
    return (1.0 + math.exp(exponent)) * (failure + _ALL_OUTSIDE)


_ALL_OUTSIDE = MAX_DRAWS * _OUTSIDE
_FAILURE_SHARE = 2.0**-18
_MAX_EPSILON = 100.0  # nothing is proven far below it
_NEVER = 2.0**-200
_NOTHING_PROVEN = Slack(math.inf, 1.0)

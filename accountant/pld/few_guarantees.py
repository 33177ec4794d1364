"""The composition of few (epsilon, delta) guarantees, exactly.

An (epsilon_i, delta_i)-DP release is dominated by one that reveals everything with probability
delta_i and otherwise is randomised response: loss +epsilon_i or -epsilon_i, with odds e^epsilon_i
(Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, Theorem 3.3 and its proof). Their composition is the
least bound that knows these numbers alone; for unequal releases it is Theorem 1.5 of Murtagh,
Vadhan 2016, arXiv:1507.03113. It is never above the sums of basic composition. The loss of all has
a value for each number of flips of each kind, which are few where the releases are.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from fedsim.accountant.arrays import Floats
from fedsim.accountant.composition import Approximate, Mechanism
from fedsim.accountant.rdp.curves import leak

_MOST_LOSSES = 1 << 14
_ROUNDING = 1e-10  # relative, of the probabilities: the logarithms of factorials have 12 digits
_LAST_DIGITS = 1e-15  # relative, of sums of losses and of logarithms

_Kinds = tuple[tuple[Approximate, int], ...]


def few_guarantees(steps: Iterable[tuple[Mechanism, int]]) -> _Kinds | None:
    """Return the steps in order if all are (epsilon, delta) guarantees and few; None otherwise.

    Args:
        steps: pairs (mechanism, number of runs >= 1).
    """
    kinds: list[tuple[Approximate, int]] = []
    for mechanism, count in steps:
        if not isinstance(mechanism, Approximate):
            return None
        kinds.append((mechanism, count))
    size = math.prod(count + 1 for kind, count in kinds if kind.epsilon > 0.0)
    if not kinds or size > _MOST_LOSSES:
        return None
    return tuple(sorted(kinds, key=lambda step: (step[0].epsilon, step[0].delta)))


def composed_epsilon(kinds: _Kinds, delta: float) -> float:
    """Return the least epsilon of the composition at `delta`, rounded up.

    Guarantee: the composition is (epsilon, delta)-DP. Infinity where `delta` does not cover the
    probability that a release reveals everything.

    Args:
        kinds: as from `few_guarantees`.
        delta: in (0, 1).
    """
    (first, count), *others = kinds
    if delta == first.delta and count == 1 and not others:  # by definition, without any slack
        return first.epsilon
    leaked = leak(kinds)
    if delta <= leaked:
        return math.inf
    left = (delta - leaked) / (1.0 - leaked) * (1.0 - _ROUNDING)
    losses, log_p = _losses(kinds)
    # Between neighbouring losses delta is mass - e^epsilon * discounted, sums over those above.
    mass = np.exp(np.logaddexp.accumulate(log_p))
    log_discounted = np.logaddexp.accumulate(log_p - losses)
    at_losses = mass - np.exp(losses + log_discounted)
    above = int(np.searchsorted(np.maximum.accumulate(at_losses), left, side="right")) - 1
    above = max(0, above)  # delta at the largest loss is 0, up to rounding
    if mass[above] <= left:
        return 0.0
    logs = math.log(mass[above] - left), float(log_discounted[above])
    crossing = logs[0] - logs[1] + _LAST_DIGITS * (1.0 + abs(logs[0]) + abs(logs[1]))
    return max(0.0, min(crossing, float(losses[above]) * (1.0 + _LAST_DIGITS)))


def composed_delta(kinds: _Kinds, epsilon: float) -> float:
    """Return delta of the composition at `epsilon`, rounded up.

    Guarantee: the composition is (epsilon, delta)-DP.

    Args:
        kinds: as from `few_guarantees`.
        epsilon: >= 0, finite.
    """
    losses, log_p = _losses(kinds)
    losses = losses + _LAST_DIGITS * losses[0]  # the largest; a computed loss may be rounded down
    above = losses > epsilon
    rest = float((np.exp(log_p[above]) * -np.expm1(epsilon - losses[above])).sum())
    leaked = leak(kinds)
    return min(1.0, leaked + (1.0 - leaked) * rest * (1.0 + _ROUNDING))


@lru_cache(maxsize=64)
def _losses(kinds: _Kinds) -> tuple[Floats, Floats]:
    """Return the losses of the composition, falling, and the logarithms of their probabilities."""
    losses, log_p = np.zeros(1), np.zeros(1)
    for kind, count in kinds:
        if kind.epsilon == 0.0:
            continue
        flips = np.arange(count + 1.0)
        choices = gammaln(count + 1.0) - gammaln(flips + 1.0) - gammaln(count - flips + 1.0)
        own = choices - flips * kind.epsilon - count * math.log1p(math.exp(-kind.epsilon))
        losses = np.add.outer(losses, (count - 2.0 * flips) * kind.epsilon).ravel()
        log_p = np.add.outer(log_p, own).ravel()
    order = np.argsort(-losses, kind="stable")
    losses, log_p = losses[order], log_p[order]
    losses.setflags(write=False)
    log_p.setflags(write=False)
    return losses, log_p

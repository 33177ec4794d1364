"""Privacy profiles delta(epsilon): exact for Gaussians and for a few (epsilon, delta) guarantees.

On two neighbouring data sets, the outputs of an unsampled Gaussian with noise multiplier z have
means that are at most mu = 1/z standard deviations apart. Releases with noise multipliers z_1 ...
z_T are together one release with mu = sqrt(sum of z_t^-2). Its profile is Theorem 8 of Balle, Wang
2018, arXiv:1805.06530.

An (epsilon_i, delta_i)-DP release is dominated by one that reveals everything with probability
delta_i and otherwise is randomised response. Its loss is +epsilon_i or -epsilon_i, with odds
e^epsilon_i (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, Theorem 3.3 and its proof). Composing
these gives the least bound that follows from these numbers alone; for unequal releases it is
Theorem 1.5 of Murtagh, Vadhan 2016, arXiv:1507.03113. The bound is never above the sums of basic
composition. A few releases have few possible composed losses, so the computation is fast.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from scipy.special import erfcx, gammaln, log_ndtr

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.composition import Approximate, Mechanism
from fedsim.accountant.rdp.curves import leak
from fedsim.accountant.search import root_between

_MOST_LOSSES = 1 << 14
_ROUNDING = 1e-10  # relative, of the probabilities: the logarithms of factorials have 12 digits
_LAST_DIGITS = 1e-15  # relative, of sums of losses and of logarithms

_Kinds = tuple[tuple[Approximate, int], ...]

_MAX_MU = 1e8  # epsilon is about 5e15 there: no guarantee is left to compute
_LEAST_MU = 1e-290  # smaller mu are raised to it: still a bound, and epsilon stays a normal number
_LOG_ROUNDING = 2e-15  # of log delta, relative; subtracted from the delta that is solved for
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_REACH = 48.0  # e^-48 = 1e-21 of the integrand is left out


def exactly_composable(steps: Iterable[tuple[Mechanism, int]]) -> _Kinds | None:
    """Return the steps as a sorted tuple if they can be composed exactly, otherwise None.

    Only (epsilon, delta) guarantees (`Approximate`) can be composed exactly. The result is None if
    a step is a mechanism of another class, or if there are too many steps.

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
    """Return the least epsilon at `delta` of composed (epsilon_i, delta_i)-DP releases, rounded up.

    Guarantee: the composition is (epsilon, delta)-DP. Epsilon is infinite if `delta` is at most the
    probability that a release reveals everything.

    Args:
        kinds: pairs (guarantee of a release, number of such releases), from `exactly_composable`.
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
    """Return the least delta at `epsilon` of composed (epsilon_i, delta_i)-DP releases, rounded up.

    Guarantee: the composition is (epsilon, delta)-DP.

    Args:
        kinds: pairs (guarantee of a release, number of such releases), from `exactly_composable`.
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
    """Return the losses of the composition, descending, and their log probabilities."""
    losses, log_p = np.zeros(1), np.zeros(1)
    for kind, count in kinds:
        if kind.epsilon == 0.0:
            continue
        flips = np.arange(count + 1.0)
        losses = np.add.outer(losses, (count - 2.0 * flips) * kind.epsilon).ravel()
        log_p = np.add.outer(log_p, log_flips(flips, kind.epsilon, count)).ravel()
    order = np.argsort(-losses, kind="stable")
    losses, log_p = losses[order], log_p[order]
    losses.setflags(write=False)
    log_p.setflags(write=False)
    return losses, log_p


def log_flips(flips: Floats, epsilon: float, count: int) -> Floats:
    """Return the log probabilities of numbers of flips in `count` = k randomised responses.

    P[l flips] = C(k, l) e^((k - l) eps) / (1 + e^eps)^k.

    Args:
        flips: the numbers l of flips, float64 (n,).
        epsilon: eps of one response, >= 0.
        count: the number k of responses.
    """
    log_choose = gammaln(count + 1.0) - gammaln(flips + 1.0) - gammaln(count - flips + 1.0)
    return log_choose - flips * epsilon - count * math.log1p(math.exp(-epsilon))


@dataclass(frozen=True, eq=False)
class DeltaCurve:
    """The curve delta(epsilon) = E[(1 - e^(epsilon - L))_+] of a privacy loss L, epsilon >= 0.

    L lies on a grid; only the points l_j = (first + j) * spacing >= 0 matter. Between them delta is
    linear in e^epsilon, so cumulative sums give delta and epsilon in closed form.

    Attributes:
        first: index of the first grid point, >= 0.
        spacing: distance of grid points.
        mass: upper tail of the loss, mass[j] = P[L >= l_j].
        discounted: discounted upper tail, discounted[j] = E[e^(l_j - L); L >= l_j].
        at_points: at_points[j] = delta(l_j) before `missing` is added; never increases.
        missing: constant added to every delta, for mass outside the grid and for rounding.
    """

    first: int
    spacing: float
    mass: Floats
    discounted: Floats
    at_points: Floats
    missing: float

    @classmethod
    def of(cls, first: int, spacing: float, pmf: Floats, missing: float) -> Self:
        """Return the curve of a loss L with P[L = (first + j) * spacing] = pmf[j] >= 0.

        Args:
            first: grid index of the first mass.
            spacing: the grid's spacing h > 0.
            pmf: the masses, float64 (points,).
            missing: constant added to every delta, for mass outside the grid.
        """
        backwards = pmf[::-1]
        mass = np.cumsum(backwards)[::-1]  # from the tail: the small numbers first
        discounted = _discount(backwards, spacing)[::-1]
        at_points = np.maximum(mass - discounted, 0.0)
        # Rounding must not break the order that the search in `epsilon` relies on.
        at_points = np.maximum.accumulate(at_points[::-1])[::-1]
        return cls(first, spacing, mass, discounted, at_points, missing)

    @property
    def nbytes(self) -> int:
        """Size of the curve's arrays, in bytes."""
        return self.mass.nbytes + self.discounted.nbytes + self.at_points.nbytes

    def delta(self, epsilon: float) -> float:
        """Return the delta of the curve at `epsilon` >= 0."""
        place = epsilon / self.spacing  # may be infinite
        if place >= self.first + self.mass.size - 1:
            return min(1.0, self.missing)
        j = max(0, math.floor(place) + 1 - self.first)  # first point above it
        gap = math.exp(min(0.0, epsilon - (self.first + j) * self.spacing))
        above = float(self.mass[j] - gap * self.discounted[j])
        return min(1.0, max(0.0, above) + self.missing)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon >= 0 with delta(epsilon) <= `delta`; infinity if none exists."""
        left = delta - self.missing
        if left <= 0.0:
            return math.inf
        j = int(np.searchsorted(-self.at_points, -left))  # first point with delta <= left
        upper = (self.first + j) * self.spacing
        lower = upper - self.spacing if j else 0.0
        excess = self.mass[j] - left
        if excess <= 0.0:
            return max(0.0, lower)
        crossing = upper + math.log(excess / self.discounted[j])
        return max(0.0, min(upper, max(lower, crossing)))


def _discount(values: Floats, spacing: float) -> Floats:
    """Return y with y[j] = values[j] + e^-spacing y[j - 1], for values >= 0.

    A run of values is a cumulative sum of e^(j spacing) values[j], scaled back. All terms are
    positive, so no digits are lost: the relative error is that of a sum and of an exponential.
    (scipy.signal has this as a filter, and takes longer to import than all of the accountants.)
    """
    run = max(1, min(values.size, _MOST, int(_SPAN / spacing)))
    growth = np.exp(spacing * np.arange(run))
    result = np.empty(values.size)
    before = 0.0  # the discounted sum of all earlier values at the first place of the run
    for start in range(0, values.size, run):
        part = result[start : start + run]
        scale = growth[: part.size]
        np.multiply(values[start : start + run], scale, out=part)
        part[0] += before
        np.cumsum(part, out=part)
        part /= scale
        before = part[-1] * math.exp(-spacing)
    return result


@dataclass(frozen=True, eq=False)
class PrivacyProfile:
    """The privacy profile delta(epsilon) of a mechanism, for one removed or added example.

    Its delta is the larger one of the directions "remove" and "add".
    """

    directions: tuple[DeltaCurve, ...]

    @property
    def nbytes(self) -> int:
        """Size of the arrays of both curves, in bytes."""
        return sum(curve.nbytes for curve in self.directions)

    @property
    def resolution(self) -> float:
        """Smallest delta at which the constants added for rounding are negligible."""
        return 1e4 * max(curve.missing for curve in self.directions)

    @property
    def spacing(self) -> float:
        """Distance of neighbouring points of the grid of losses."""
        return self.directions[0].spacing

    def delta(self, epsilon: float) -> float:
        """Return the larger delta of the directions "remove" and "add" at `epsilon` >= 0."""
        return max(curve.delta(epsilon) for curve in self.directions)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon >= 0 with delta(epsilon) <= `delta`; infinity if none exists."""
        return max(curve.epsilon(delta) for curve in self.directions)


_SPAN = 200.0  # of the exponents in a run: e^200 is far inside the range, and exact to 3e-14
_MOST = 1 << 13  # values of a run, which stay in the processor's cache


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return log delta(epsilon) of the pair N(mu, 1), N(0, 1), exact even where delta underflows.

    Guarantee: the pair dominates a Gaussian release with noise multiplier 1/mu, in both
    directions, so the release is (epsilon, delta)-DP.

    Args:
        mu: distance of the two Gaussians in standard deviations, > 0, finite.
        epsilon: >= 0, finite.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> import math
        >>> from fedsim.accountant.pld.privacy_profile import gaussian_log_delta
        >>> round(math.exp(gaussian_log_delta(mu=1.0, epsilon=1.0)), 4)
        0.1269
    """
    mu = checks.positive("mu", mu)
    epsilon = checks.non_negative("epsilon", epsilon)
    return _log_delta(mu, epsilon)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon >= 0 at which N(mu, 1) against N(0, 1) has the given `delta`.

    The result is exact to 1e-12 relative.

    Edge cases: mu above 1e8 gives infinity.

    Args:
        mu: distance of the two Gaussians in standard deviations, > 0, finite.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.pld.privacy_profile import gaussian_epsilon
        >>> round(gaussian_epsilon(mu=0.5, delta=1e-5), 3)  # a noise multiplier of 2
        1.993
    """
    mu = checks.positive("mu", mu)
    log_delta = math.log(checks.open_probability("delta", delta))
    if mu > _MAX_MU:
        return math.inf
    mu = max(mu, _LEAST_MU)
    if _log_delta(mu, 0.0) <= log_delta:
        return 0.0
    # Zero-concentrated DP bounds epsilon from above (Bun, Steinke 2016, Proposition 1.3).
    upper = 0.5 * mu + math.sqrt(-2.0 * log_delta) + 1e-9
    aim = log_delta - _LOG_ROUNDING * (1.0 - log_delta)
    root = root_between(
        lambda ratio: _log_delta(mu, mu * ratio) - aim, 0.0, upper, absolute=1e-300, relative=1e-14
    )
    return mu * root * (1.0 + 2e-14)  # at or above the root whatever the solver rounded


def _log_delta(mu: float, epsilon: float) -> float:
    """Return log of Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    near, far = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    if near > 1e154:  # its square overflows
        return -math.inf
    if mu < 1.0:
        # The two parts are alike. Their difference is the integral over s > 0 of
        # phi(near + s) (1 - e^(-mu s)), where nothing cancels.
        scale = _REACH / (near + math.sqrt(near * near + 2.0 * _REACH)) * 2.0
        s = 0.5 * scale * (_NODES + 1.0)
        density = np.exp(-s * (near + 0.5 * s)) * -np.expm1(-mu * s) / mu
        total = 0.5 * scale * float(_WEIGHTS @ density) / math.sqrt(2.0 * math.pi)
        return math.log(total) + math.log(mu) - 0.5 * near * near
    if near > -1.0:
        # Both parts share the factor phi(near); what is left, Mills ratios, stays of order 1.
        gap = float(erfcx(near / math.sqrt(2.0)) - erfcx(far / math.sqrt(2.0)))
        return math.log(max(0.5 * gap, 5e-324)) - 0.5 * near * near
    first, second = float(log_ndtr(-near)), epsilon + float(log_ndtr(-far))
    return first + math.log(-math.expm1(min(second - first, -1e-300)))

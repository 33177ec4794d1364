"""Estimates of epsilon(delta) to many digits by inverting a Laplace transform; NOT a bound.

Let K(s) be the log moment generating function of the composed loss. Then for any c > 0

    delta(epsilon) = 1/(2 pi i) * integral over Re s = c of exp(K(s) - s epsilon) / (s (s+1)) ds

(Zhu, Dong, Wang 2022, arXiv:2106.08567; Alghamdi et al. 2023, arXiv:2208.09595). There is no grid
of losses and nothing is truncated. So this estimate shares no error with `distribution` and serves
as a cross-check. The estimate is also several times faster. But its error is only estimated, so no
guarantee may be printed from it: use `distribution` for that.

The contour runs through the saddle point, where the integrand cancels least. The result is accepted
only if it stays the same when both numerical integrals, K(s) and the one above, use half the step.
In addition, the terms of the integral must not cancel, and they must decay within a limited number
of terms. Otherwise `InversionError` is raised. This happens for a few steps with small sampling
rates, whose transform decays slowly, and for astronomical epsilon.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Complexes, Floats
from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.curves import rdp_table
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS
from fedsim.core.errors import FedsimError

_Steps = Mapping[SampledGaussian, int]

_AGREEMENT = 1e-9  # of log delta, between one resolution and twice that
_CONDITION = 1e-5  # least |sum| / sum of moduli: 1e-16 of rounding becomes 1e-11
_BUDGET = 1 << 24  # complex exponentials per integral, about half a second
_REFINEMENTS = (1, 2, 4, 8)
_BLOCK = 64  # contour points evaluated at a time
_LOG_ROOT_2_PI = 0.5 * math.log(2.0 * math.pi)
_TAIL = 9.5  # standard deviations of the noise over which expectations run
_CANDIDATES = np.exp(np.linspace(math.log(1e-4), math.log(16.0), 97))


class InversionError(FedsimError, ArithmeticError):
    """Raised if the inversion is not reliable; use the PLD accountant for this composition."""


def near_exact_epsilon(steps: _Steps, delta: float) -> float:
    """Return an estimate of epsilon at `delta`, usually to 9 significant digits; not a bound.

    Args:
        steps: number of runs >= 1 of each mechanism; not empty. The adjacency must be zero-out or
            add-remove.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is outside its range.
        InversionError: the numerical checks of the inversion failed.
    """
    log_delta = math.log(checks.open_probability("delta", delta))
    upper, order = epsilon_from_rdp(DEFAULT_ORDERS, _rdp(steps), delta)
    if not math.isfinite(upper):
        raise InversionError(f"epsilon is not finite by Rényi DP, got {dict(steps)!r}")
    remove = _solve(_Transform(steps, "remove"), log_delta, 0.9 * upper, order)
    add = _Transform(steps, "add")
    # "add" is rarely larger: usually its Chernoff bound shows that it is not.
    if _saddle(add, remove, order).log_bound <= log_delta:
        return remove
    return max(remove, _solve(add, log_delta, remove, order))


class _Saddle(NamedTuple):
    """The point where the contour crosses the real axis.

    Attributes:
        c: the real part of the contour.
        top: log of the integrand at c.
        width: scale of the integrand's decay along the contour.
        log_bound: Chernoff's bound on log delta at c.
    """

    c: float
    top: float
    width: float
    log_bound: float


class _Value(NamedTuple):
    log_delta: float
    slope: float  # of log delta in epsilon


@dataclass(frozen=True)
class _Transform:
    """K(s) of one direction of a composition, by the trapezoid rule in the noise's space.

    "remove" is log E_mu0[r^(s+1)], "add" log E_mu0[r^-s], in the notation of `rdp.poisson`.
    """

    steps: _Steps
    direction: Literal["remove", "add"]

    def __call__(self, s: Complexes, refinement: int = 1) -> tuple[Complexes, int]:
        """Return K at every s, and the number of exponentials computed."""
        powers = s + 1.0 if self.direction == "remove" else -s
        total, work = np.zeros(s.shape, dtype=np.complex128), 0
        for (q, z), count in self.steps.items():
            if q == 1.0:
                total += count * s * (s + 1.0) * (0.5 / z / z)
                continue
            log_weight, log_r = _nodes(q, z, powers, refinement)
            terms = log_weight + powers[:, None] * log_r
            top = terms.real.max(axis=1)
            sums = np.exp(terms - top[:, None]).sum(axis=1)
            total += count * (top + np.log(sums))
            work += terms.size
        return total, work


def _nodes(q: float, z: float, powers: Complexes, refinement: int) -> tuple[Floats, Floats]:
    """Return the log weights and log r at the quadrature nodes of E_mu0[r^power] for all powers.

    r^(iy) has frequencies up to y / z^2, the Gaussian up to about 9 / z; r vanishes pi z^2 off
    the real axis.
    """
    real, fastest = powers.real, float(np.abs(powers.imag).max())
    low = min(0.0, float(real.min())) - _TAIL * z
    high = max(1.0, float(real.max())) + _TAIL * z
    spacing = min(2.0 * math.pi / (fastest / z / z + 20.0 / z), z * z / 3.0) / refinement
    count = math.ceil((high - low) / spacing)
    if count * powers.size > _BUDGET:
        raise InversionError(f"too many nodes ({count}) for z={z!r}")
    x = low + spacing * np.arange(count + 1)
    log_r: Floats = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / z / z)
    log_weight: Floats = -0.5 * np.square(x / z) + math.log(spacing / z) - _LOG_ROOT_2_PI
    return log_weight, log_r


def _rdp(steps: _Steps) -> Floats:
    if not steps or not all(isinstance(kind, SampledGaussian) for kind in steps):
        raise ValueError(f"steps must map SampledGaussian to counts, got {dict(steps)!r}")
    return np.array(list(steps.values())) @ rdp_table(list(steps), DEFAULT_ORDERS)


def _solve(transform: _Transform, log_delta: float, epsilon: float, order: float) -> float:
    """Return the epsilon at `log_delta` by Newton's method; 0 if delta(0) is smaller."""
    error = math.nan
    for refinement in _REFINEMENTS:
        epsilon = _newton(transform, log_delta, epsilon, order, refinement)
        saddle = _saddle(transform, epsilon, order)
        error = _invert(transform, epsilon, saddle, 2 * refinement).log_delta - log_delta
        if abs(error) <= _AGREEMENT or (epsilon == 0.0 and error <= 0.0):
            return epsilon
    raise InversionError(f"log delta at {epsilon!r} still changes by {error!r} with the resolution")


def _newton(
    transform: _Transform, log_delta: float, epsilon: float, order: float, refinement: int
) -> float:
    for _ in range(60):
        saddle = _saddle(transform, epsilon, order)
        value = _invert(transform, epsilon, saddle, refinement)
        change = (log_delta - value.log_delta) / value.slope
        previous, epsilon = epsilon, max(0.0, epsilon + change)
        if abs(epsilon - previous) <= 1e-12 + 1e-11 * epsilon:
            return epsilon
    raise InversionError(f"the search for epsilon does not settle near {epsilon!r}")


def _saddle(transform: _Transform, epsilon: float, order: float) -> _Saddle:
    """Return the saddle point at `epsilon`, searched near the best Rényi order `order`."""

    def heights(points: Floats) -> Floats:
        return transform(points.astype(np.complex128))[0].real - points * epsilon

    c = (order + 1.0) * _CANDIDATES
    for _ in range(2):
        height = heights(c) - np.log(c * (c + 1.0))
        best = int(np.clip(height.argmin(), 1, c.size - 2))
        c = np.linspace(c[best - 1], c[best + 1], 21)
    height = heights(c) - np.log(c * (c + 1.0))
    best = int(np.clip(height.argmin(), 1, c.size - 2))
    curvature = float(height[best + 1] - 2.0 * height[best] + height[best - 1])
    curvature = max(curvature / float(c[1] - c[0]) ** 2, 1e-300)
    point, top = float(c[best]), float(height[best])
    # (1 - e^-x)_+ <= e^(s x) s^s / (s + 1)^(s + 1)
    log_bound = top + (point + 1.0) * math.log(point) - point * math.log1p(point)
    return _Saddle(point, top, 1.0 / math.sqrt(curvature), log_bound)


def _invert(transform: _Transform, epsilon: float, saddle: _Saddle, refinement: int) -> _Value:
    """Return log delta and its slope from the contour integral, by the trapezoid rule.

    The rule returns the sum over k of delta(epsilon + k p) exp(k c p) with p = 2 pi / step: the
    negative k add at most exp(-c p), the positive ones exp(-2 pi^2 (width / step)^2) where the
    integrand is like a Gaussian.
    """
    c, top, width, _ = saddle
    step = min(0.5 * width, 2.0 * math.pi * c / (28.0 - min(top, 0.0))) / refinement
    total, moment, moduli, work, start = 0.0, 0.0, 0.0, 0, 0
    while True:
        s = c + 1j * step * np.arange(start, start + _BLOCK)
        logs, cost = transform(s, refinement)
        terms: Complexes = np.exp(logs - s * epsilon - np.log(s) - np.log(s + 1.0) - top)
        if start == 0:
            terms[0] *= 0.5  # the lower half of the contour is the mirror image
        total += float(terms.real.sum())
        moment += float((s * terms).real.sum())
        moduli += float(np.abs(terms).sum())
        work, start = work + cost, start + _BLOCK
        if float(np.abs(terms).max()) < 1e-14 * moduli:
            break
        if work > _BUDGET:
            raise InversionError(f"the integrand has not died out at s={complex(s[-1])!r}")
    if not total > _CONDITION * moduli:
        raise InversionError(f"the integral cancels: {total!r} of {moduli!r} is left")
    return _Value(top + math.log(total * step / math.pi), -moment / total)

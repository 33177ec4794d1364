"""The privacy loss distribution of one step on a grid, by the method "connect the dots".

A step has sampling rate q and noise multiplier z. Its dominating pair is mu = (1-q) N(0, z^2) + q
N(1, z^2) against mu0 = N(0, z^2) (Zhu, Dong, Wang 2022, arXiv:2106.08567, Theorem 11). "remove"
compares mu with mu0, "add" compares mu0 with mu. The privacy loss is L = log r with
r(x) = 1 - q + q e^t, t = (x - 1/2) / z^2, and rises with x.

Connect the dots (Doroshenko et al. 2022, arXiv:2207.04380): take the masses P_c and Q_c of the pair
between two neighbouring grid points a < b. They move to a and b so that both masses are kept. The
discrete pair dominates the true one, and agrees with it at every grid point.

Replace-one adjacency. Let H_t(P || Q) = sup over A of P(A) - t Q(A). The module uses two pairs for
it. Each is its own mirror image, so H_t for t >= 1 determines the pair: H_t = 1 - t + t H_(1/t).

Lemma. For t >= 1, c >= 0 and |u| <= a, |w| <= b, the supremum over A of
N(0)(A) - c N(u)(A) - t N(w)(A), all with covariance z^2, is largest for u = a e and w = b e with a
unit vector e. Proof: by Neyman and Pearson, N(u)(A) >= Phi(Phi^-1(N(0)(A)) - |u| / z), likewise w;
and half-spaces orthogonal to e attain both bounds at once.

Let v and v' be the contributions of the replaced example, of norm at most 1, to the release, and
N(u) the Gaussian with mean u and covariance z^2.

- Poisson sampling. Given which other examples are in the sample, the releases are
  (1-q) N(0) + q N(v) and (1-q) N(0) + q N(v'), |v|, |v'| <= 1. Moved by -v, H_t is q times the
  supremum of the lemma with c = (1-q)(t-1)/q, u = -v and w = v' - v: largest for v = e, v' = -e.
  The pair is (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1).
- Without replacement. A sample with the replaced example is coupled with the sample that has
  another example in its place, whose contribution is y: (1-q) N(y) + q N(v) and
  (1-q) N(y) + q N(v'). Now |y - v| <= 2 and |v' - v| <= 2: the worst case is y = v', where H_t is
  that of "remove" at z / 2. (This is Theorem 9 of Balle, Barthe, Gaboardi 2018, arXiv:1807.01647.)
  Both orders of the pair have this profile for t >= 1.

Mixing over the samples of the others does not increase H_t, which is jointly convex; and dominating
pairs of adaptive steps compose (Zhu, Dong, Wang 2022, Theorem 10).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedsim.accountant.checks import Complexes, Floats

MAX_CELLS = 1 << 20
_REACH = 9.4  # standard deviations kept; a Gaussian has 3e-21 beyond
_NODES, _WEIGHTS = (
    array.astype(float) for array in np.polynomial.legendre.leggauss(5)
)  # exact to 1e-14 on the narrow cells below


@dataclass(frozen=True, eq=False)
class LossPmf:
    """The probability mass function of a discrete privacy loss.

    Attributes:
        first: index of the first grid point.
        mass: probability at each grid point; mass[i] belongs to the loss (first + i) * spacing.
        infinite: probability of an infinite loss.
        log_mass: logarithm of `mass`.
    """

    first: int
    mass: Floats
    infinite: float
    log_mass: Floats

    @classmethod
    def of(cls, first: int, mass: Floats, infinite: float) -> Self:
        """Return a probability mass function whose masses are scaled so that the total is 1.

        Args:
            first: index of the first grid point, whose loss is first * spacing.
            mass: probability at each grid point, float64 (points,), with rounding errors; the
                array is scaled in place, and is read-only afterwards.
            infinite: probability of an infinite loss, which is not scaled.
        """
        mass *= (1.0 - infinite) / mass.sum()
        mass.setflags(write=False)
        with np.errstate(divide="ignore"):
            return cls(first, mass, infinite, np.log(mass))

    @property
    def nbytes(self) -> int:
        """Size of the arrays, in bytes."""
        return self.mass.nbytes + self.log_mass.nbytes

    @property
    def last(self) -> int:
        """Index of the last grid point."""
        return self.first + self.mass.size - 1

    @property
    def places(self) -> NDArray[np.intp]:
        """Indices of all grid points."""
        return np.arange(self.first, self.last + 1)

    def log_mgf(self, slope: float) -> float:
        """Return log E[exp(slope * index); loss finite] over the index of the grid point."""
        exponent = self.log_mass + slope * self.places
        top = float(exponent.max())
        return top + math.log(float(np.exp(exponent - top).sum()))

    def spectrum(self, size: int) -> Complexes:
        """Return the FFT of the masses, laid on a circle of `size` grid points."""
        return np.fft.rfft(np.bincount(self.places % size, self.mass, size))


def loss_range(q: float, z: float) -> tuple[float, float]:
    """Return the least and largest privacy loss of a step in the direction "remove".

    Tails with less than 1e-20 of the probability mass are left out.

    Args:
        q: sampling rate in (0, 1].
        z: noise multiplier > 0.
    """
    return _loss(float(q == 1.0) - _REACH * z, q, z), _loss(1.0 + _REACH * z, q, z)


@lru_cache(maxsize=4096)
def loss_variance(q: float, z: float) -> float:
    """Return the approximate variance of a step's privacy loss in the direction "remove".

    The spacing of the grid is chosen by this variance.

    Args:
        q: sampling rate in (0, 1].
        z: noise multiplier > 0.
    """
    x = np.linspace(-_REACH * z, 1.0 + _REACH * z, 2001)
    if z < 1e-3:  # two narrow bumps that the grid would miss
        return 1.0 / z / z
    t = (x - 0.5) / z / z
    loss = _log_ratio(t, q)
    weight = (1.0 - q) * np.exp(-0.5 * (x / z) ** 2) + q * np.exp(-0.5 * ((x - 1.0) / z) ** 2)
    weight /= weight.sum()
    mean = float(weight @ loss)
    return float(weight @ (loss - mean) ** 2)


def step_pmfs(q: float, z: float, spacing: float) -> tuple[LossPmf, LossPmf]:
    """Return the pmfs of one step's privacy loss on a grid, in the directions ("remove", "add").

    Guarantee: each pmf, taken as a privacy loss distribution, dominates the step in its direction:
    delta(epsilon) is never below the true one, except by rounding (1e-15).

    Args:
        q: sampling rate in (0, 1].
        z: noise multiplier, > 0.
        spacing: distance of grid points, > 0; at most `MAX_CELLS` points may cover the loss range.
    """
    low, high = loss_range(q, z)
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    epsilon = spacing * np.arange(first, last + 1, dtype=np.float64)
    t = _log_tilt(epsilon, q)
    x = 0.5 + z * z * t
    to_low, to_high = _cell_parts(x, t, epsilon[0], q, z)
    remove = np.zeros(epsilon.size)
    remove[:-1] += to_low / math.expm1(spacing)
    remove[1:] += to_high / -math.expm1(-spacing)
    # Mass outside the grid moves up: to the next grid point, or to infinity.
    above = _mixture_below(-x[-1], q, z, sign=-1.0)
    below = _mixture_below(x[0], q, z)
    if q == 1.0:  # the two directions are alike
        remove[0] += below
        pmf = LossPmf.of(first, remove, above)
        return pmf, pmf
    # Keeping P and Q in each cell makes the other direction the same masses times e^-loss, which
    # cannot overflow: no loss is below log(1-q) > -37.
    add = (remove * np.exp(-epsilon))[::-1].copy()
    remove[0] += below
    add[0] += float(ndtr(-x[-1] / z))
    return (
        LossPmf.of(first, remove, above),
        LossPmf.of(-last, add, float(ndtr(x[0] / z))),
    )


def highest_replaced_loss(q: float, z: float) -> float:
    """Return the largest privacy loss of `ReplacedGaussian`; the least one is its negative.

    Args:
        q: sampling rate in (0, 1).
        z: noise multiplier > 0.
    """
    farthest = 1.0 + _REACH * z
    return _loss(farthest, q, z) - _loss(-farthest, q, z)


def mirrored_pmf(positive: Floats, infinite: float, spacing: float) -> LossPmf:
    """Return the pmf of a pair that is its own mirror image, from its masses at losses > 0.

    The mass of P at -l is the mass of Q at l, which is e^-l times the mass of P at l. All other
    mass is at 0, including the mirror image of `infinite`, which would lie below every loss.

    Args:
        positive: masses at the grid points 1, 2, ..., float64 (points,).
        infinite: probability of an infinite loss.
        spacing: distance of grid points, > 0.
    """
    negative = positive * np.exp(-spacing * np.arange(1.0, positive.size + 1.0))
    centre = 1.0 - infinite - float(positive.sum()) - float(negative.sum())
    mass = np.concatenate((negative[::-1], [max(0.0, centre)], positive))
    return LossPmf.of(-positive.size, mass, infinite)


def replaced_masses(q: float, z: float, spacing: float) -> tuple[Floats, float]:
    """Return the masses of `ReplacedGaussian` at the positive grid points, and the mass beyond.

    Args:
        q: sampling rate in (0, 1).
        z: noise multiplier > 0.
        spacing: distance of grid points, > 0.
    """
    last = math.ceil(highest_replaced_loss(q, z) / spacing)
    epsilon = spacing * np.arange(last + 1, dtype=np.float64)
    x = _replaced_position(epsilon, q, z)
    to_low, to_high = _replaced_cell_parts(x, epsilon, q, z)
    mass = np.zeros(epsilon.size)
    mass[:-1] += to_low / math.expm1(spacing)
    mass[1:] += to_high / -math.expm1(-spacing)
    return mass[1:], _mixture_below(-x[-1], q, z, sign=-1.0)


def _replaced_position(epsilon: Floats, q: float, z: float) -> Floats:
    """Return the positions x at which the loss is epsilon >= 0.

    w = e^(x/z^2) solves k w^2 - b w - e^epsilon k = 0 with b = (1-q) (e^epsilon - 1) and
    k = q e^(-1/(2 z^2)), so it is (b + (b^2 + 4 k^2 e^epsilon)^(1/2)) / (2 k).
    """
    with np.errstate(divide="ignore"):  # b = 0 at epsilon = 0
        log_b = math.log1p(-q) + epsilon + np.log(-np.expm1(-epsilon))
    log_k = math.log(q) - 0.5 / z / z
    log_root = 0.5 * np.logaddexp(2.0 * log_b, math.log(4.0) + 2.0 * log_k + epsilon)
    x = z * z * (np.logaddexp(log_b, log_root) - math.log(2.0) - log_k)
    x[0] = 0.0  # by symmetry; and the rounding of z^2 times a difference would be the largest here
    return x


def _replaced_cell_parts(x: Floats, epsilon: Floats, q: float, z: float) -> tuple[Floats, Floats]:
    """Return e^b Q_c - P_c and P_c - e^a Q_c of every cell [a, b] of the replace-one pair."""
    xa, xb = x[:-1], x[1:]
    narrow = (xb - xa) < 0.5 * z * min(1.0, z)
    to_low, to_high = np.empty_like(xa), np.empty_like(xa)
    at = np.flatnonzero(narrow)
    to_low[at], to_high[at] = _narrow_replaced(xa[at], xb[at], epsilon[at], q, z)
    at = np.flatnonzero(~narrow)
    parts = [_normal_mass((xa[at] - m) / z, (xb[at] - m) / z) for m in (-1.0, 0.0, 1.0)]
    p, other = (1.0 - q) * parts[1] + q * parts[2], (1.0 - q) * parts[1] + q * parts[0]
    factor_a, factor_b = (np.exp(np.minimum(part[at], 700.0)) for part in (epsilon, epsilon[1:]))
    # Beyond 700 the exponential overflows: all mass moves to the upper end instead, a bound.
    huge = epsilon[1:][at] > 700.0
    low, high = factor_b * other - p, p - factor_a * other
    to_low[at] = np.where(huge, 0.0, np.maximum(low, 0.0))
    to_high[at] = np.where(huge, p * -math.expm1(epsilon[0] - epsilon[1]), np.maximum(high, 0.0))
    return to_low, to_high


def _narrow_replaced(
    xa: Floats, xb: Floats, epsilon: Floats, q: float, z: float
) -> tuple[Floats, Floats]:
    """Return the parts of narrow cells by Gauss's rule, with e^loss - e^a and e^b - e^loss."""
    half = 0.5 * (xb - xa)
    low, high = np.zeros_like(xa), np.zeros_like(xa)

    def share(x: Floats, sign: float) -> Floats:
        """Return q N(sign) / ((1-q) N(0) + q N(sign)) at x."""
        tilt = (sign * x - 0.5) / z / z
        return np.exp(math.log(q) + tilt - _log_ratio(tilt, q))

    share_p, share_q = share(xa, 1.0), share(xa, -1.0)

    def rise_to(x: Floats) -> Floats:
        """Return the loss at x minus the loss at xa: two terms >= 0, so nothing cancels."""
        move = (x - xa) / z / z
        return np.log1p(share_p * np.expm1(move)) - np.log1p(share_q * np.expm1(-move))

    width = rise_to(xb)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        x = xa + half * (1.0 + node)
        rise = rise_to(x)
        log_q = _log_ratio((-x - 0.5) / z / z, q) - 0.5 * (x / z) ** 2
        at_a = np.exp(epsilon + log_q)  # e^a times the density of Q
        high += weight * at_a * np.expm1(rise)
        low += weight * at_a * np.exp(rise) * np.expm1(width - rise)
    scale = half / (z * math.sqrt(2.0 * math.pi))
    return np.maximum(low * scale, 0.0), np.maximum(high * scale, 0.0)


def two_point_masses(epsilon: float, delta: float, spacing: float) -> tuple[Floats, float]:
    """Return the masses of an (epsilon, delta)-DP release at positive grid points and infinity.

    The dominating pair has infinite loss with probability delta, else epsilon or -epsilon with odds
    e^epsilon : 1 (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776); epsilon is split between its
    neighbouring grid points so that both masses are kept.

    Args:
        epsilon: the epsilon of the release, >= 0.
        delta: the delta of the release, in [0, 1).
        spacing: distance of grid points, > 0.
    """
    upper = max(1, math.ceil(epsilon / spacing))
    mass = np.zeros(upper)
    whole = (1.0 - delta) / (1.0 + math.exp(-epsilon))
    above = -math.expm1((upper - 1) * spacing - epsilon) / -math.expm1(-spacing)
    above = min(1.0, max(0.0, above))
    mass[-1] = whole * above
    if upper > 1:
        mass[-2] = whole * (1.0 - above)
    return mass, delta


def _loss(x: float, q: float, z: float) -> float:
    return float(_log_ratio(np.array([(x - 0.5) / z / z]), q)[0])


def _log_ratio(t: Floats, q: float) -> Floats:
    """Return log(1 - q + q e^t)."""
    if q == 1.0:
        return t
    lowest = -np.inf if q < 0.5 else -0.5  # below it log1p would cancel
    return np.where(
        (t > lowest) & (t < 1.0),
        np.log1p(q * np.expm1(np.clip(t, lowest, 1.0))),
        np.logaddexp(math.log1p(-q), math.log(q) + t),
    )


def _log_tilt(epsilon: Floats, q: float) -> Floats:
    """Return t with log(1 - q + q e^t) = epsilon, -inf where epsilon is below every loss."""
    if q == 1.0:
        return epsilon
    with np.errstate(divide="ignore"):
        low = np.log(np.maximum(np.exp(np.minimum(epsilon, -0.5)) - (1.0 - q), 0.0) / q)
        middle = np.log1p(np.maximum(np.expm1(np.clip(epsilon, -0.5, 1.0)) / q, -1.0))
    high = epsilon + np.log1p(-(1.0 - q) * np.exp(-np.maximum(epsilon, 1.0))) - math.log(q)
    return np.where(epsilon < -0.5, low, np.where(epsilon < 1.0, middle, high))


def _tilt_below(epsilon: float, q: float) -> float:
    """Return (e^epsilon - (1 - q)) / q, for q near 0 and near 1 without cancelling twice."""
    return (math.expm1(epsilon) + q if q < 0.5 else math.exp(epsilon) - (1.0 - q)) / q


def _cell_parts(x: Floats, t: Floats, lowest: float, q: float, z: float) -> tuple[Floats, Floats]:
    """Return e^b Q_c - P_c and P_c - e^a Q_c of every cell [a, b], to full relative precision.

    With e^a = 1 - q + q e^ta they are q times the integrals over the cell of mu0 (e^tb - e^t) and
    mu0 (e^t - e^ta). Narrow cells, where differences would cancel, are integrated by Gauss's rule;
    wide ones, where that is inexact, are differences of the normal distribution function.
    """
    width, tilt = np.diff(x), np.diff(t)
    to_low, to_high = np.empty_like(width), np.empty_like(width)
    narrow = (width < 0.5 * z) & (tilt < 0.5)
    ends = np.flatnonzero(narrow)
    to_low[ends], to_high[ends] = _narrow_cells(x[ends], x[ends + 1], t[ends], t[ends + 1], z)
    ends = np.flatnonzero(~narrow)
    factor_a, factor_b = np.exp(t[ends]), np.exp(t[ends + 1])
    if x[0] == -math.inf:  # the first grid point may be below every loss: "e^t" is negative there
        factor_a[0] = _tilt_below(lowest, q)
    to_low[ends], to_high[ends] = _wide_cells(x[ends], x[ends + 1], factor_a, factor_b, z)
    return q * to_low, q * to_high


def _narrow_cells(
    xa: Floats, xb: Floats, ta: Floats, tb: Floats, z: float
) -> tuple[Floats, Floats]:
    low, high = np.zeros_like(xa), np.zeros_like(xa)
    half_x, half_t = 0.5 * (xb - xa), 0.5 * (tb - ta)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        x = xa + half_x * (1.0 + node)
        density = np.exp(
            ta - 0.5 * (x / z) ** 2
        )  # times e^ta, which could overflow if computed alone
        rise = np.expm1(half_t * (1.0 + node))
        high += weight * density * rise
        low += weight * density * (1.0 + rise) * np.expm1(half_t * (1.0 - node))
    scale = half_x / (z * math.sqrt(2.0 * math.pi))
    return low * scale, high * scale


def _wide_cells(
    xa: Floats, xb: Floats, factor_a: Floats, factor_b: Floats, z: float
) -> tuple[Floats, Floats]:
    mass = _normal_mass(xa / z, xb / z)
    tilted = _normal_mass((xa - 1.0) / z, (xb - 1.0) / z)  # mu0 e^t is N(1, z^2)
    return (
        np.maximum(factor_b * mass - tilted, 0.0),
        np.maximum(tilted - factor_a * mass, 0.0),
    )


def _normal_mass(a: Floats, b: Floats) -> Floats:
    """Return the standard normal mass of [a, b], from the tail that keeps more digits."""
    flip = a > 0
    return ndtr(np.where(flip, -a, b)) - ndtr(np.where(flip, -b, a))


def _mixture_below(x: float, q: float, z: float, sign: float = 1.0) -> float:
    """Return the mass of (1-q) N(0, z^2) + q N(sign, z^2) below x."""
    return float((1.0 - q) * ndtr(x / z) + q * ndtr((x - sign) / z))

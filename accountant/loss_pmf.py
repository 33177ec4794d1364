"""The privacy loss of one Poisson-sampled Gaussian step, on a grid (connect the dots).

The dominating pair is mu = (1-q) N(0, z^2) + q N(1, z^2) against mu0 = N(0, z^2) (Zhu, Dong, Wang
2022, arXiv:2106.08567, Theorem 11): "remove" compares mu with mu0, "add" compares mu0 with mu. Its
loss L = log r, r(x) = 1 - q + q e^t with t = (x - 1/2) / z^2, rises with x.

Connect the dots (Doroshenko et al. 2022, arXiv:2207.04380): for each cell between neighbouring grid
points a < b the masses P_c and Q_c that the pair has there move to a and b such that both masses
are kept. The discrete pair dominates the true one, and agrees with it at every grid point.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]

MAX_CELLS = 1 << 20
_REACH = 9.4  # standard deviations kept; a Gaussian has 3e-21 beyond
_NODES, _WEIGHTS = (
    array.astype(float) for array in np.polynomial.legendre.leggauss(5)
)  # exact to 1e-14 on the narrow cells below


@dataclass(frozen=True, eq=False)
class LossPmf:
    """Probability masses of a discrete privacy loss.

    Attributes:
        first: index of the first grid point; mass[i] sits at loss (first + i) * spacing.
        mass: probability at each grid point.
        infinite: probability of an infinite loss.
        log_mass: logarithm of `mass`.
    """

    first: int
    mass: Floats
    infinite: float
    log_mass: Floats

    @classmethod
    def of(cls, first: int, mass: Floats, infinite: float) -> Self:
        """Returns the pmf, with the last rounding error in its total removed."""
        mass *= (1.0 - infinite) / mass.sum()
        mass.setflags(write=False)
        with np.errstate(divide="ignore"):
            return cls(first, mass, infinite, np.log(mass))


def loss_range(q: float, z: float) -> tuple[float, float]:
    """Returns the losses of "remove" beyond which a step has less than 1e-20 of its mass."""
    return _loss(float(q == 1.0) - _REACH * z, q, z), _loss(1.0 + _REACH * z, q, z)


@lru_cache(maxsize=4096)
def loss_variance(q: float, z: float) -> float:
    """Returns the variance of the "remove" loss, to a few digits: it only steers the grid."""
    x = np.linspace(-_REACH * z, 1.0 + _REACH * z, 2001)
    if z < 1e-3:  # two narrow bumps that the grid would miss
        return 1.0 / z / z
    t = (x - 0.5) / z / z
    loss = _log_ratio(t, q)
    weight = (1.0 - q) * np.exp(-0.5 * (x / z) ** 2) + q * np.exp(-0.5 * ((x - 1.0) / z) ** 2)
    weight /= weight.sum()
    mean = float(weight @ loss)
    return float(weight @ (loss - mean) ** 2)


@lru_cache(maxsize=64)
def step_pmfs(q: float, z: float, spacing: float) -> tuple[LossPmf, LossPmf]:
    """Returns the ("remove", "add") loss of one step with all masses rounded to `spacing`.

    Guarantee: each pmf, taken as a privacy loss distribution, dominates its direction of the step:
    delta(epsilon) is nowhere below the true one, except by rounding (1e-15).

    Args:
        q: sampling rate in (0, 1].
        z: noise multiplier, > 0.
        spacing: distance of grid points, > 0; the loss range must fit in `MAX_CELLS` of them.
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
    # What lies outside the grid moves up: to the next grid point, or to infinity.
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


def _loss(x: float, q: float, z: float) -> float:
    return float(_log_ratio(np.array([(x - 0.5) / z / z]), q)[0])


def _log_ratio(t: Floats, q: float) -> Floats:
    """Returns log(1 - q + q e^t)."""
    if q == 1.0:
        return t
    lowest = -np.inf if q < 0.5 else -0.5  # below it log1p would cancel
    return np.where(
        (t > lowest) & (t < 1.0),
        np.log1p(q * np.expm1(np.clip(t, lowest, 1.0))),
        np.logaddexp(math.log1p(-q), math.log(q) + t),
    )


def _log_tilt(epsilon: Floats, q: float) -> Floats:
    """Returns t with log(1 - q + q e^t) = epsilon, -inf where epsilon is below every loss."""
    if q == 1.0:
        return epsilon
    with np.errstate(divide="ignore"):
        low = np.log(np.maximum(np.exp(np.minimum(epsilon, -0.5)) - (1.0 - q), 0.0) / q)
        middle = np.log1p(np.maximum(np.expm1(np.clip(epsilon, -0.5, 1.0)) / q, -1.0))
    high = epsilon + np.log1p(-(1.0 - q) * np.exp(-np.maximum(epsilon, 1.0))) - math.log(q)
    return np.where(epsilon < -0.5, low, np.where(epsilon < 1.0, middle, high))


def _tilt_below(epsilon: float, q: float) -> float:
    """Returns (e^epsilon - (1 - q)) / q, for q near 0 and near 1 without cancelling twice."""
    return (math.expm1(epsilon) + q if q < 0.5 else math.exp(epsilon) - (1.0 - q)) / q


def _cell_parts(x: Floats, t: Floats, lowest: float, q: float, z: float) -> tuple[Floats, Floats]:
    """Returns e^b Q_c - P_c and P_c - e^a Q_c of every cell [a, b], to full relative precision.

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
        density = np.exp(ta - 0.5 * (x / z) ** 2)  # times e^ta, which may overflow on its own
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
    """Returns the standard normal mass of [a, b], from whichever tail keeps its digits."""
    flip = a > 0
    return ndtr(np.where(flip, -a, b)) - ndtr(np.where(flip, -b, a))


def _mixture_below(x: float, q: float, z: float, sign: float = 1.0) -> float:
    """Returns the mass of (1-q) N(0, z^2) + q N(sign, z^2) below x."""
    return float((1.0 - q) * ndtr(x / z) + q * ndtr((x - sign) / z))

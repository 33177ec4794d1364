"""Privacy loss distributions, on a grid, of all mechanisms that have a dominating pair.

Most of them come from `loss_pmf`. This module computes one pass of random allocation (balls and
bins) over b batches with noise multiplier z.

The dominating pair of a pass is P, the mean over i of N(e_i, z^2 I) with unit vectors e_i, against
Q = N(0, z^2 I), both in b dimensions (Chua et al. 2024, arXiv:2412.16802;
`rdp/random_allocation.py` shows why adaptive steps reduce to it). Under Q the likelihood ratio r of
the pair is the mean of b independent ratios w_i of one Gaussian each. The method below uses the
convex order. Another efficient method is that of Feldman, Shenfeld 2026, arXiv:2602.17284.

Both hockey-stick divergences, E_Q[(r - t)_+] of "remove" and E_Q[(1 - t r)_+] of "add", are
expectations of convex functions of r. So a mean-preserving spread of r gives a pair that dominates
(P, Q), in both directions at once. The convex order is kept by sums of independent variables. Hence
every rounding here is such a spread: a value between two grid points moves to both of them, in the
proportion that keeps its mean (connect the dots). Mass above the grid moves to the last grid point
and to infinity, where it keeps its mean as mass of P alone. Mass below the grid moves to the first
point and to 0, where P has no mass.

The sum of b ratios is built from sums of 1, 2, 4, ... ratios. Each sum has its own grid of values,
even in log scale about the mean of the sum and wider far from it. A spread between points that are
h apart in log scale adds at most h^2/4 to the relative variance of a value. This is small compared
with the relative variance of r.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedsim.accountant.checks import Floats, cached_by_bytes
from fedsim.accountant.composition import (
    AllocatedGaussian,
    Approximate,
    FixedSizeGaussian,
    ReplacedGaussian,
    SampledGaussian,
)
from fedsim.accountant.pld.loss_pmf import (
    LossPmf,
    highest_replaced_loss,
    loss_range,
    loss_variance,
    mirrored_pmf,
    replaced_masses,
    step_pmfs,
    two_point_masses,
)

_POINTS = 640  # of a grid
_BINS = 512  # to find a grid's ends
_NOTHING = 1e-22  # mass beyond each end of a grid
_CACHE_BYTES = 128 << 20  # a step at the finest grids has 32 MB


@dataclass(frozen=True, eq=False)
class _Ratios:
    """The distribution of a sum of likelihood ratios under Q.

    Attributes:
        values: the finite values of the sum, ascending from 0.
        masses: the probabilities of the values.
        mean: the mean of the sum, including the part at infinity.
        infinite: the part of the mean that lies at infinity.
    """

    values: Floats
    masses: Floats
    mean: float
    infinite: float


def allocation_range(batches: int, z: float) -> tuple[float, float]:
    """Return the least and largest finite privacy loss of a random-allocation pass.

    The loss is that of removing an example (direction "remove").

    Args:
        batches: number of batches, b >= 2.
        z: noise multiplier > 0.
    """
    values = _mean_ratio(batches, z).values
    return math.log(values[1]), math.log(values[-1])


def allocation_variance(batches: int, z: float) -> float:
    """Return the variance of the privacy loss of a random-allocation pass.

    The loss is that of removing an example (direction "remove"), rounded to a grid.

    Args:
        batches: number of batches, b >= 2.
        z: noise multiplier > 0.
    """
    ratios = _mean_ratio(batches, z)
    weight, loss = (ratios.masses * ratios.values)[1:], np.log(ratios.values[1:])
    weight /= weight.sum()
    mean = float((weight * loss).sum())
    return float((weight * (loss - mean) ** 2).sum())


def allocation_pmfs(batches: int, z: float, spacing: float) -> tuple[LossPmf, LossPmf]:
    """Return the pmfs of a random-allocation pass's privacy loss on a grid.

    The result is the pair of the directions "remove" and "add".

    Guarantee: each pmf, taken as a privacy loss distribution, dominates the pass in its direction:
    delta(epsilon) is never below the true one, except by rounding (1e-15).

    Args:
        batches: number of batches, b >= 2.
        z: noise multiplier > 0.
        spacing: distance of grid points, > 0.
    """
    low, high = allocation_range(batches, z)
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    grid = np.exp(spacing * np.arange(first, last + 1, dtype=np.float64))
    ratios = _mean_ratio(batches, z)
    spread = _spread(ratios.values, ratios.masses, grid, ratios.infinite, ratios.mean)
    zero, masses = float(spread.masses[0]), spread.masses[1:]
    return (
        LossPmf.of(first, masses * grid, spread.infinite),
        LossPmf.of(-last, masses[::-1].copy(), zero),
    )


@lru_cache(maxsize=256)
def _mean_ratio(batches: int, z: float) -> _Ratios:
    """Return the distribution of the mean of b independent ratios."""
    total = single = _one_ratio(z)
    for bit in bin(batches)[3:]:
        total = _sum(total, total)
        if bit == "1":
            total = _sum(total, single)
    values = total.values / batches
    return _Ratios(values, total.masses, 1.0, total.infinite / batches)


def _one_ratio(z: float) -> _Ratios:
    """Return the distribution of the ratio N(1, z^2) / N(0, z^2) under N(0, z^2)."""
    low, high = loss_range(1.0, z)
    spacing = (high - low) / _POINTS
    pmf, _ = step_pmfs(1.0, z, spacing)
    loss = spacing * pmf.places
    masses = np.exp(pmf.log_mass - loss)
    zero = max(0.0, 1.0 - float(masses.sum()))
    return _Ratios(np.exp(np.append(-np.inf, loss)), np.append(zero, masses), 1.0, pmf.infinite)


def _sum(first: _Ratios, second: _Ratios) -> _Ratios:
    """Return the distribution of the sum of two independent sums, on a new grid."""
    values = np.add.outer(first.values, second.values).ravel()
    masses = np.multiply.outer(first.masses, second.masses).ravel()
    mean, infinite = first.mean + second.mean, first.infinite + second.infinite
    return _spread(values, masses, _grid(values, masses, mean), infinite, mean)


def _grid(values: Floats, masses: Floats, mean: float) -> Floats:
    """Return grid points for a sum: even in log scale about its mean, wider far from it.

    Args:
        values: values of the sum, float64 (n,).
        masses: probabilities of the values, float64 (n,).
        mean: the sum's mean.
    """
    positive = values[values > 0.0]
    bins = np.linspace(math.log(positive.min()), math.log(positive.max()), _BINS + 1)
    place = np.searchsorted(np.exp(bins[1:-1]), values)
    mass = np.bincount(place, masses, _BINS)
    either = mass + np.bincount(place, masses * values, _BINS) / mean  # under Q or under P
    low = bins[np.searchsorted(np.cumsum(either), _NOTHING)]
    high = bins[_BINS - np.searchsorted(np.cumsum(either[::-1]), _NOTHING)]
    centre = math.log(mean)
    distance = 0.5 * (bins[1:] + bins[:-1]) - centre
    width = math.sqrt(float((mass * distance**2).sum()))
    ends = np.arcsinh(np.array([low - centre, high - centre]) / width)
    return np.exp(centre + width * np.sinh(np.linspace(ends[0], ends[1], _POINTS)))


def _spread(values: Floats, masses: Floats, grid: Floats, infinite: float, mean: float) -> _Ratios:
    """Return a mean-preserving spread of a variable to 0, grid points and infinity.

    Args:
        values: values >= 0 of the variable, float64 (n,).
        masses: probabilities of the values, float64 (n,).
        grid: the new values > 0, ascending, float64 (m,).
        infinite: the part of the mean that lies at infinity.
        mean: the variable's mean.
    """
    points = np.concatenate(([0.0], grid))
    inside = np.minimum(values, points[-1])
    infinite += float((masses * (values - inside)).sum())
    cell = np.minimum(np.searchsorted(points, inside, side="right"), grid.size) - 1
    share = (inside - points[cell]) / np.diff(points)[cell]
    new_masses = np.bincount(cell, masses * (1.0 - share), points.size)
    new_masses += np.bincount(cell + 1, masses * share, points.size)
    new_masses /= new_masses.sum()  # doubling would double the error of the total
    return _Ratios(points, new_masses, mean, infinite)


Dominated = SampledGaussian | ReplacedGaussian | FixedSizeGaussian | AllocatedGaussian | Approximate


def mechanism_range(mechanism: Dominated) -> tuple[float, float]:
    """Return a mechanism's least and largest privacy loss in the direction "remove".

    Tails with less than 1e-20 of the probability mass are left out.
    """
    match mechanism:
        case SampledGaussian():
            return loss_range(*mechanism)
        case AllocatedGaussian(batches, z):
            return allocation_range(batches, z)
        case ReplacedGaussian(q, z):
            highest = highest_replaced_loss(q, z)
        case FixedSizeGaussian(q, z):
            highest = loss_range(q, 0.5 * z)[1]
        case Approximate(epsilon):
            highest = epsilon
    return -highest, highest


def mechanism_variance(mechanism: Dominated) -> float:
    """Return the approximate variance of a mechanism's privacy loss, to choose a grid spacing."""
    match mechanism:
        case SampledGaussian():
            return loss_variance(*mechanism)
        case AllocatedGaussian(batches, z):
            return allocation_variance(batches, z)
        case ReplacedGaussian(q, z):
            # A small loss is about the sum of two examples' losses.
            return 4.0 * loss_variance(q, z)
        case FixedSizeGaussian(q, z):
            return loss_variance(q, 0.5 * z)
        case Approximate(epsilon):
            return epsilon * epsilon


@cached_by_bytes(_CACHE_BYTES)
def mechanism_pmfs(mechanism: Dominated, spacing: float) -> tuple[LossPmf, LossPmf]:
    """Return the pmfs of a mechanism's privacy loss on a grid, in directions ("remove", "add").

    Guarantee: each pmf, taken as a privacy loss distribution, dominates the mechanism in its
    direction: delta(epsilon) is never below the true one, except by rounding (1e-15).

    Args:
        mechanism: the mechanism, run once.
        spacing: the grid's spacing h > 0.
    """
    match mechanism:
        case SampledGaussian():
            return step_pmfs(*mechanism, spacing)
        case AllocatedGaussian(batches, z):
            return allocation_pmfs(batches, z, spacing)
        case ReplacedGaussian(q, z):
            positive, infinite = replaced_masses(q, z, spacing)
        case FixedSizeGaussian(q, z):
            remove, _ = step_pmfs(q, 0.5 * z, spacing)
            positive, infinite = remove.mass[1 - remove.first :], remove.infinite
        case Approximate(epsilon, delta):
            positive, infinite = two_point_masses(epsilon, delta, spacing)
    pmf = mirrored_pmf(positive, infinite, spacing)
    return pmf, pmf

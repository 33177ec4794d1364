"""The privacy profile delta(epsilon) of a discrete privacy loss, and its inverse in closed form."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedsim.accountant.arrays import Floats


@dataclass(frozen=True, eq=False)
class DeltaCurve:
    """delta(epsilon) = E[(1 - e^(epsilon - L))_+] for a loss L on the grid, epsilon >= 0.

    Only the grid points l_j = (first + j) * spacing >= 0 matter; between them delta is linear in
    e^epsilon, so both directions of the question have a closed form from cumulative sums.

    Attributes:
        first: index of the first grid point, >= 0.
        spacing: distance of grid points.
        mass: mass[j] = P[L >= l_j].
        discounted: discounted[j] = E[e^(l_j - L); L >= l_j].
        at_points: at_points[j] = delta(l_j) without `missing`; never increases.
        missing: a constant added to delta, for mass that the grid does not hold and for rounding.
    """

    first: int
    spacing: float
    mass: Floats
    discounted: Floats
    at_points: Floats
    missing: float

    @classmethod
    def of(cls, first: int, spacing: float, pmf: Floats, missing: float) -> Self:
        """Return the curve of the loss with P[L = (first + j) * spacing] = pmf[j] >= 0.

        Args:
            first: grid index of the first mass.
            spacing: the grid's spacing h > 0.
            pmf: the masses, float64 (cells,).
            missing: mass outside the grid, added to every delta.
        """
        backwards = pmf[::-1]
        mass = np.cumsum(backwards)[::-1]  # from the tail: the small numbers first
        discounted = _discount(backwards, spacing)[::-1]
        at_points = np.maximum(mass - discounted, 0.0)
        # Rounding must not break the order that the search in `epsilon` relies on.
        at_points = np.maximum.accumulate(at_points[::-1])[::-1]
        return cls(first, spacing, mass, discounted, at_points, missing)

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        return self.mass.nbytes + self.discounted.nbytes + self.at_points.nbytes

    def delta(self, epsilon: float) -> float:
        """Return delta at `epsilon` >= 0."""
        j = max(0, math.floor(epsilon / self.spacing) + 1 - self.first)  # first point above it
        if j >= self.mass.size:
            return min(1.0, self.missing)
        gap = math.exp(min(0.0, epsilon - (self.first + j) * self.spacing))
        return min(1.0, max(0.0, self.mass[j] - gap * self.discounted[j]) + self.missing)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon >= 0 with delta(epsilon) <= `delta`; infinity if none has."""
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
        own = result[start : start + run]
        scale = growth[: own.size]
        np.multiply(values[start : start + run], scale, out=own)
        own[0] += before
        np.cumsum(own, out=own)
        own /= scale
        before = own[-1] * math.exp(-spacing)
    return result


@dataclass(frozen=True, eq=False)
class PrivacyProfile:
    """The profile of a mechanism: the larger delta of the two directions, "remove" and "add"."""

    directions: tuple[DeltaCurve, DeltaCurve]

    @property
    def resolution(self) -> float:
        """The delta below which the constants added for rounding become noticeable."""
        return 1e4 * max(curve.missing for curve in self.directions)

    @property
    def spacing(self) -> float:
        """Distance of grid points."""
        return self.directions[0].spacing

    def delta(self, epsilon: float) -> float:
        """Return delta at `epsilon` >= 0."""
        return max(curve.delta(epsilon) for curve in self.directions)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon >= 0 at `delta`; infinity if there is none."""
        return max(curve.epsilon(delta) for curve in self.directions)


_SPAN = 200.0  # of the exponents in a run: e^200 is far inside the range, and exact to 3e-14
_MOST = 1 << 13  # values of a run, which stay in the processor's cache

"""Noise that is correlated from step to step: a banded Toeplitz factor of the prefix sums.

Fresh noise Z_t becomes y_t = Z_t − rint(Σ_{j ≥ 1} c_j y_{t−j}), so that a part of each step's noise
is taken back in the steps after it, and sums over many steps are less noisy. That is the matrix
mechanism with C lower-triangular, Toeplitz, and zero below its first bands: C y = Z (McMahan et al.
2024, arXiv:2405.15913; Choquette-Choo et al. 2023, arXiv:2306.08153). Theorem and proof:
docs/correlated_noise.md.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np

from fedsim.accountant import SelfComposed
from fedsim.accountant.arrays import Floats
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.limits import MAX_NOISE_BANDS

COEFFICIENT_BITS = 16
"""Coefficients are multiples of 2⁻¹⁶: their products with noise below 2³² are exact in float64."""


@dataclass(frozen=True)
class NoiseCorrelation:
    """The correlation of a client's noise over its whole run.

    Guarantee: where an example can be in at most one of any `bands` successive lots, the releases
    of a run are, for this example, one release with noise multiplier z / ‖c‖ for each of these lots
    (docs/correlated_noise.md). That is what `charges` returns.

    Attributes:
        coefficients: c_0 = 1, c_1, ..., each a multiple of 2⁻¹⁶; their number is the bands.
        planned_steps: steps of the whole run. They are charged together, before the first one.

    Raises:
        ValueError: a coefficient is not such a number, or the first is not 1.
    """

    coefficients: tuple[float, ...]
    planned_steps: int

    def __post_init__(self) -> None:
        whole = [(c * 2**COEFFICIENT_BITS).is_integer() for c in self.coefficients]
        if not 1 <= len(whole) <= MAX_NOISE_BANDS or self.coefficients[0] != 1.0 or not all(whole):
            raise ValueError(
                f"coefficients must be 1 to {MAX_NOISE_BANDS} multiples of 2^-{COEFFICIENT_BITS}, "
                f"the first of them 1, got {self.coefficients}"
            )

    @classmethod
    def toeplitz(cls, bands: int, planned_steps: int) -> Self:
        """Return the first bands of the square root of the prefix-sum matrix: 1, 1/2, 3/8, ...

        Args:
            bands: number of coefficients, at least 1.
            planned_steps: steps of the whole run.
        """
        return cls(square_root_coefficients(bands), planned_steps)

    @property
    def bands(self) -> int:
        """Number of coefficients."""
        return len(self.coefficients)

    @cached_property
    def column_norm(self) -> float:
        """‖c‖, the L2 norm of the coefficients: how far an example in one lot moves C x."""
        return math.hypot(*self.coefficients)

    def charges(self, cycle: Charges, first_step: int, steps: int) -> Charges:
        """Return (event, count) for some steps: all planned steps with the first one, then nothing.

        Args:
            cycle: (event, count) of all planned steps with noise that is not correlated.
            first_step: number of the first step.
            steps: number of steps.

        Raises:
            ValueError: the steps go beyond the plan.
        """
        if first_step + steps > self.planned_steps:
            raise ValueError(
                f"correlated noise is charged for {self.planned_steps} steps, and steps up to "
                f"{first_step + steps} are asked for"
            )
        if first_step or not steps:
            return []
        return [(SelfComposed(event, count), 1) for event, count in cycle]


@lru_cache(maxsize=MAX_NOISE_BANDS)
def square_root_coefficients(bands: int) -> tuple[float, ...]:
    """Return c_j = binomial(2 j, j) / 4^j for j < bands, rounded to multiples of 2⁻¹⁶."""
    exact = [1.0]
    for j in range(1, bands):
        exact.append(exact[-1] * (2 * j - 1) / (2 * j))
    unit = 2.0**COEFFICIENT_BITS
    return tuple(round(value * unit) / unit for value in exact)


def inverse_coefficients(coefficients: tuple[float, ...], steps: int) -> Floats:
    """Return the first column (steps,) of C⁻¹: y_t = Σ_j d_j Z_{t−j}, rounding aside.

    Args:
        coefficients: c of `NoiseCorrelation`.
        steps: number of rows of C, at least 1.
    """
    later = np.array(coefficients[1:])
    inverse = np.zeros(steps + len(later))  # zeros stand for the steps before the first
    inverse[len(later)] = 1.0
    for t in range(len(later) + 1, len(inverse)):
        inverse[t] = -(later @ inverse[t - len(later) : t][::-1])
    return inverse[len(later) :]


def prefix_error(coefficients: tuple[float, ...], steps: int) -> float:
    """Return the root mean square error of the sums of the first 1 ... `steps` releases.

    It is in standard deviations of the fresh noise Z: ‖A C⁻¹‖_F / √steps, with A the matrix of
    prefix sums. Noise without correlation has √((steps + 1) / 2).

    Args:
        coefficients: c of `NoiseCorrelation`.
        steps: T, at least 1.
    """
    sums = np.cumsum(inverse_coefficients(coefficients, steps))
    return math.sqrt(float(np.mean(np.cumsum(sums**2))))

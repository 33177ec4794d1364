"""Strategies of correlated noise: what a client costs, and how noisy sums over rounds are.

A strategy is a matrix C with a row for each number that is drawn, and a column for each round (Li
et al. 2015, "The matrix mechanism"; Denisov et al. 2022, arXiv:2202.08312). Let f be the sums of a
run's rounds. The releases are a function of C f + Z, with independent noise Z. So the cost of a
client follows from the sensitivity, the L2 norm by which the client moves C f. Sums over the first
rounds have less noise than with independent noise at the same ε. Units: one client moves a round's
sum by at most 1, and the noise Z has standard deviation 1.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedsim.accountant.checks import Floats
from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.noise.correlated.participation import MinSeparation

COEFFICIENT_BITS = 16
"""Fraction bits of a matrix entry; products with noise below 2³² are then exact in float64."""

_ROUNDED_UP = 1.0 + 2.0**-30  # more than the rounding of sums of a run's coefficients


@dataclass(frozen=True)
class PrefixError:
    """Size of the noise in the models after 1, 2, ..., n rounds.

    Attributes:
        rms: root of the mean noise variance of these models.
        largest: largest standard deviation of the noise in one of these models.
    """

    rms: float
    largest: float


class NoiseStrategy(ABC):
    """Base class of noise strategies; each is a frozen dataclass with public numbers only."""

    @property
    @abstractmethod
    def buffers(self) -> int:
        """Number of float64 arrays from which noise is made, each as large as the model."""

    @abstractmethod
    def sensitivity(self, participation: MinSeparation) -> float:
        """Return an upper bound, rounded up, on the L2 norm by which one client moves C f.

        C is the strategy's matrix, and f are the sums of all rounds without noise.

        Args:
            participation: bound on the rounds of the client.
        """

    @abstractmethod
    def covariance(self, rounds: int) -> Floats:
        """Return the covariance of the noise of the first rounds, (rounds, rounds)."""

    @abstractmethod
    def prefix_variances(self, rounds: int, momentum: float = 0.0) -> Floats:
        """Return the variance of the noise in the models after 1, 2, ... rounds, (rounds,).

        A model is the sum of the updates of all rounds so far.

        Args:
            rounds: number of rounds n, at least 1.
            momentum: momentum β of the server's optimizer, in [0, 1): the update of a round is β
                times that of the round before, plus the release.
        """

    def prefix_error(self, rounds: int, momentum: float = 0.0) -> PrefixError:
        """Return the size of the noise in the models after 1, 2, ... rounds.

        The arguments are those of `prefix_variances`.
        """
        variances = self.prefix_variances(rounds, momentum)
        return PrefixError(math.sqrt(float(variances.mean())), math.sqrt(float(variances.max())))

    def extra_roundings(self, participation: MinSeparation) -> int:
        """Return the number of rounds in which one client moves a release by rounding alone.

        Such a move is by at most 1 grid step.

        Args:
            participation: bound on the rounds of the client.
        """
        return 0


class ToeplitzStrategy(NoiseStrategy):
    """Base class of strategies with a lower-triangular Toeplitz matrix C with diagonal 1.

    The coefficients c_0 = 1 ≥ c_1 ≥ c_2 ≥ ... ≥ 0 are the first column of C.
    """

    @abstractmethod
    def coefficients(self, rounds: int) -> Floats:
        """Return the first column of the strategy's Toeplitz matrix C, (rounds,)."""

    def inverse(self, rounds: int) -> Floats:
        """Return the first column of the inverse of the strategy's matrix C, (rounds,)."""
        return inverse_coefficients(tuple(self.coefficients(rounds).tolist()), rounds)

    def sensitivity(self, participation: MinSeparation) -> float:
        """Return the largest L2 norm, rounded up, by which one client moves C f.

        C is the strategy's matrix, and f are the sums of all rounds without noise. A client in the
        rounds `participation.pattern` moves C f by this norm.
        """
        coefficients = self.coefficients(participation.rounds)
        moved = np.zeros(participation.rounds)
        for first in participation.pattern:
            moved[first:] += coefficients[: participation.rounds - first]
        return math.sqrt(math.fsum((moved**2).tolist())) * _ROUNDED_UP

    def covariance(self, rounds: int) -> Floats:
        """Return the covariance of the noise of the first rounds, (rounds, rounds)."""
        matrix, column = np.zeros((rounds, rounds)), self.inverse(rounds)
        for first in range(rounds):
            matrix[first:, first] = column[: rounds - first]
        return matrix @ matrix.T

    def prefix_variances(self, rounds: int, momentum: float = 0.0) -> Floats:
        """Return the variance of the noise in the models after 1, 2, ... rounds, (rounds,)."""
        moved = np.cumsum(self.inverse(rounds))  # by fresh noise, in the model so many rounds later
        for later in range(1, rounds if momentum else 0):
            moved[later] += momentum * moved[later - 1]
        return np.cumsum(moved**2)


@dataclass(frozen=True)
class BandedStrategy(ToeplitzStrategy):
    """Noise strategy with a banded Toeplitz matrix: few of its coefficients are not 0.

    Attributes:
        bands: the coefficients c_0 = 1 ≥ c_1 ≥ ... > 0, multiples of 2⁻¹⁶; all others are 0. A
            single coefficient gives independent noise.

    Raises:
        ValueError: there are too many, they increase, or one is not a positive multiple of 2⁻¹⁶.
    """

    bands: tuple[float, ...]

    def __post_init__(self) -> None:
        whole = all((c * 2**COEFFICIENT_BITS).is_integer() and c > 0.0 for c in self.bands)
        falls = list(self.bands) == sorted(self.bands, reverse=True)
        if not 1 <= len(self.bands) <= MAX_NOISE_BANDS or self.bands[0] != 1.0 or not whole & falls:
            raise ValueError(
                f"bands must be 1 to {MAX_NOISE_BANDS} positive multiples of 2^-{COEFFICIENT_BITS} "
                f"that do not increase, the first of them 1, got {self.bands}"
            )

    @property
    def buffers(self) -> int:
        """Number of earlier rounds whose noise is kept in memory."""
        return len(self.bands) - 1

    def coefficients(self, rounds: int) -> Floats:
        """Return the first column of the strategy's Toeplitz matrix C, (rounds,)."""
        column = np.zeros(rounds)
        known = self.bands[:rounds]
        column[: len(known)] = known
        return column

    @cached_property
    def _inverses(self) -> dict[int, Floats]:
        return {}

    def inverse(self, rounds: int) -> Floats:
        """Return the first column of the inverse of the strategy's matrix C, (rounds,)."""
        if rounds not in self._inverses:
            self._inverses[rounds] = inverse_coefficients(self.bands, rounds)
        return self._inverses[rounds]

    def extra_roundings(self, participation: MinSeparation) -> int:
        """Return the number of rounds in which one client moves a release by rounding alone."""
        return min(participation.rounds - 1, participation.max_rounds * self.buffers)


INDEPENDENT = BandedStrategy((1.0,))
"""Strategy of independent noise; a client is charged for the whole run at once."""


@lru_cache(maxsize=MAX_NOISE_BANDS)
def square_root_coefficients(bands: int) -> tuple[float, ...]:
    """Return the first `bands` coefficients of the square root of the prefix-sum matrix.

    Coefficient j is binomial(2 j, j) / 4^j, rounded to a multiple of 2⁻¹⁶, for j = 0, 1, ...
    """
    exact = [1.0]
    for j in range(1, bands):
        exact.append(exact[-1] * (2 * j - 1) / (2 * j))
    unit = 2.0**COEFFICIENT_BITS
    return tuple(round(value * unit) / unit for value in exact)


def inverse_coefficients(coefficients: tuple[float, ...], steps: int) -> Floats:
    """Return the first column d (steps,) of the inverse of a lower-triangular Toeplitz matrix C.

    Without rounding, the noise of step t is y_t = Σ_j d_j Z_{t−j}, with fresh noise Z.

    Args:
        coefficients: c_0 = 1, c_1, ..., the first column of C without its last zeros.
        steps: number of rows of C, at least 1.
    """
    later = np.array(coefficients[1:])
    inverse = np.zeros(steps + len(later))  # zeros stand for the steps before the first
    inverse[len(later)] = 1.0
    for t in range(len(later) + 1, len(inverse)):
        inverse[t] = -(later @ inverse[t - len(later) : t][::-1])
    return inverse[len(later) :]

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
from fedsim.noise.correlated.settings import MinSeparation

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


@dataclass(frozen=True)
class TreeStrategy(NoiseStrategy):
    """Noise strategy of the binary tree over the rounds of a run, with Honaker's estimator.

    A block of 2^h rounds that begins at a multiple of 2^h is a node, with noise of its own (Dwork
    et al. 2010; Chan et al. 2011). A node's sum is also the sum of its two halves, so the two
    estimates are averaged, from the leaves on (Honaker 2015; Kairouz et al. 2021,
    arXiv:2103.00039). The sum of the first t rounds adds up the nodes of the binary digits of t.
    Only nodes of rounds that are over are used, so every round is released when it ends.

    Attributes:
        rounds: number of rounds n of the run, at least 1. No noise is drawn for later nodes.
    """

    rounds: int

    @property
    def buffers(self) -> int:
        """Number of tree levels; at most one finished node of each level is kept in memory."""
        return self.rounds.bit_length()

    def sensitivity(self, participation: MinSeparation) -> float:
        """Return an upper bound on the L2 norm by which one client moves the sums of all nodes.

        The client is in at most k rounds, which are at least b apart. A node of 2^h rounds has at
        most m = min(k, ⌈2^h / b⌉) of them. On each level, the sum of squares is largest if as many
        nodes as possible have m rounds of the client.
        """
        squares = 0
        for height in range(self.buffers):
            length = 1 << height
            most = min(participation.max_rounds, -(-length // participation.rounds_apart))
            full = min(participation.max_rounds // most, participation.rounds // length)
            rest = participation.max_rounds - full * most
            squares += full * most**2
            if full < participation.rounds // length:
                squares += rest**2
        return math.sqrt(squares) * _ROUNDED_UP

    def covariance(self, rounds: int) -> Floats:
        """Return the covariance of the noise of the first rounds, (rounds, rounds)."""
        drawn = 0
        finished: list[dict[int, float]] = []  # a finished node's estimate, by number of a draw
        sums = list[dict[int, float]]()
        for step in range(rounds):
            node = {drawn: 1.0}
            drawn += 1
            for height in range(1, new_nodes(step)):
                halves = _added(finished.pop(), node)
                weight = TREE_WEIGHTS[height]
                node = {draw: (1.0 - weight) * value for draw, value in halves.items()}
                node[drawn] = weight
                drawn += 1
            finished.append(node)
            total: dict[int, float] = {}
            for estimate in finished:
                total = _added(total, estimate)
            sums.append(total)
        matrix = np.zeros((rounds, drawn))
        for row, total in zip(matrix, sums, strict=True):
            row[list(total)] = list(total.values())
        steps = np.diff(matrix, axis=0, prepend=0.0)
        return steps @ steps.T

    def prefix_variances(self, rounds: int, momentum: float = 0.0) -> Floats:
        """Return the variance of the noise in the models after 1, 2, ... rounds, (rounds,).

        With momentum β a model is β times the previous model, plus the estimated sum. So all rounds
        of a node together multiply the pair (model, sum) by a matrix and add the node's noise.
        """
        nodes, noise = list[tuple[Floats, Floats]](), np.ones((2, 2))
        for height in range(self.buffers):
            decay = momentum ** (1 << height)
            moves = np.array([[decay, (1.0 - decay) / (1.0 - momentum)], [0.0, 1.0]])
            nodes.append((moves, noise))
            # The noise of the parent: of both halves, with their sums replaced by its estimate.
            weight = TREE_WEIGHTS[height + 1]
            joined = np.array([[1.0, -weight], [0.0, 1.0 - weight]])
            noise = joined @ (moves @ noise @ moves.T + noise) @ joined.T + weight**2
        ends, covariances = np.arange(1, rounds + 1), np.zeros((rounds, 2, 2))
        for height in reversed(range(self.buffers)):
            moves, noise = nodes[height]
            ending = (ends >> height) & 1 == 1
            covariances[ending] = moves @ covariances[ending] @ moves.T + noise
        return covariances[:, 0, 0]


def new_nodes(step: int) -> int:
    """Return the number of tree nodes whose last round is the given round.

    Args:
        step: number of the round, from 0.
    """
    return ((step + 1) & -(step + 1)).bit_length()


def _tree_weights(heights: int) -> tuple[float, ...]:
    """Return the weight of a node's own noisy sum in its estimate, by its height, (heights,).

    The best weight of a node whose halves have variance v each is 2 v / (1 + 2 v).
    """
    weights, variance, unit = [1.0], 1.0, 2.0**COEFFICIENT_BITS
    for _ in range(1, heights):
        weight = round(2.0 * variance / (1.0 + 2.0 * variance) * unit) / unit
        variance = weight**2 + (1.0 - weight) ** 2 * 2.0 * variance
        weights.append(weight)
    return tuple(weights)


TREE_WEIGHTS = _tree_weights(32)
"""Weight of a tree node's own noisy sum in the node's estimate, by the height of the node.

Weights are multiples of 2⁻¹⁶, so that products with noise are exact. Any weight gives an unbiased
sum.
"""


def _added(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in first | second}

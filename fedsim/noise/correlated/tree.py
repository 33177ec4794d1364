"""The binary tree: noisy sums of blocks of 1, 2, 4, ... rounds, joined by Honaker's estimator.

A block of 2^h rounds that begins at a multiple of 2^h is a node, with noise of its own (Dwork et
al. 2010; Chan et al. 2011). A node's sum is also the sum of its two halves, so the two estimates
are averaged, from the leaves on (Honaker 2015; Kairouz et al. 2021, arXiv:2103.00039). The sum of
the first t rounds adds up the nodes of the binary digits of t. Only nodes of rounds that are over
are used, so every round is released when it ends.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedsim.accountant.checks import Floats
from fedsim.noise.correlated.participation import MinSeparation
from fedsim.noise.correlated.strategies import COEFFICIENT_BITS, NoiseStrategy

_ROUNDED_UP = 1.0 + 2.0**-30


@dataclass(frozen=True)
class TreeStrategy(NoiseStrategy):
    """Noise strategy of the binary tree over the rounds of a run.

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

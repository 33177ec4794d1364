"""The rows of correlated noise: their law, their bits, their memory, and what a client moves."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.core.streams import Purpose, stream_key
from fedsim.noise.correlated.blt import BltStrategy
from fedsim.noise.correlated.rows import NoiseOfRounds, noise_rows
from fedsim.noise.correlated.run import RunCorrelation
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.noise.correlated.strategies import (
    BandedStrategy,
    NoiseStrategy,
    TreeStrategy,
    square_root_coefficients,
)
from fedsim.noise.sources import DEVIATION, NoiseSource, SeededNoise

FALSE_ALARM = 1e-9
STRATEGIES = [
    BandedStrategy((1.0,)),
    BandedStrategy(square_root_coefficients(4)),
    BltStrategy((0.3, 0.15), (0.5, 0.9)),
    TreeStrategy(24),
]
by_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda strategy: f"{type(strategy).__name__}{strategy.buffers}"
)


def fresh(round_number: int) -> NoiseSource:
    return SeededNoise(stream_key(5, Purpose.SERVER_NOISE, round_number=round_number))


def rows_of(strategy: NoiseStrategy, rounds: int, size: int) -> np.ndarray:
    """Noise (rounds, size) of the first rounds."""
    noise = NoiseOfRounds(strategy, fresh)
    return torch.stack(
        [noise.at(t + 1).fill_(torch.empty(size, dtype=torch.float64)) for t in range(rounds)]
    ).numpy()


def whiteness(rows: np.ndarray, covariance: np.ndarray) -> float:
    """The chance of rows as unlike the covariance as these, by χ² over variances and pairs."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), rows) / DEVIATION
    steps, size = rows.shape
    products = white @ white.T / size
    pairs = products[np.tril_indices(steps, -1)] * math.sqrt(size)
    squares = (np.diag(products) - 1.0) * math.sqrt(size / 2.0)
    return float(stats.chi2(len(pairs) + steps).sf(float((pairs**2).sum() + (squares**2).sum())))


@by_strategy
def test_the_rows_have_the_covariance_that_is_charged_and_no_other(strategy: NoiseStrategy) -> None:
    rows = rows_of(strategy, 12, 60_000)
    assert whiteness(rows, strategy.covariance(12)) > FALSE_ALARM
    other = strategy.covariance(12)
    other[3:, 3:] *= 1.05
    assert whiteness(rows, other) < FALSE_ALARM
    assert np.array_equal(rows, np.rint(rows))


@by_strategy
def test_a_process_that_starts_anywhere_has_the_same_bits(strategy: NoiseStrategy) -> None:
    whole = rows_of(strategy, 20, 501)
    for first in (1, 7, 16, 20):  # after a restart, or a repeated round
        again = NoiseOfRounds(strategy, fresh)
        for number in (first, first, min(first + 1, 20)):
            row = again.at(number).fill_(torch.empty(501, dtype=torch.float64))
            assert np.array_equal(row.numpy(), whole[number - 1])


@pytest.mark.parametrize("bands", [2, 17, 18, 128])
def test_rows_of_bands_are_the_sum_over_earlier_rows_in_any_order(bands: int) -> None:
    strategy = BandedStrategy(square_root_coefficients(bands))
    rows = rows_of(strategy, 160, 3)
    for t in range(160):
        back = [strategy.bands[j] * rows[t - j] for j in range(1, min(bands, t + 1))]
        drawn = fresh(t + 1).fill_(torch.empty(3, dtype=torch.float64)).numpy()
        assert np.array_equal(rows[t], drawn - np.rint(np.sum([np.zeros(3), *back], axis=0)))


@by_strategy
def test_memory_does_not_grow_over_200_rounds(strategy: NoiseStrategy) -> None:
    rows, size = noise_rows(strategy, 64), 64
    for step in range(200):
        rows.next_row(fresh(step + 1))
    kept = [value for value in vars(rows).values() if isinstance(value, torch.Tensor | list)]
    most = 8 if isinstance(strategy, TreeStrategy) else strategy.buffers  # 200 has 8 digits
    if isinstance(strategy, BandedStrategy):
        most += min(16, strategy.buffers)  # sums for the next steps
    values = [torch.stack(value) if isinstance(value, list) else value for value in kept]
    assert sum(value.numel() for value in values) <= (most + 1) * size


@by_strategy
@pytest.mark.parametrize("early", [False, True], ids=["allowed", "one round too early"])
def test_the_loss_of_the_worst_rounds_is_that_of_the_claimed_gaussian(
    strategy: NoiseStrategy, early: bool
) -> None:
    """δ(ε) of a client at rounds 0, 4, 8, ..., by the rows themselves; five standard errors.

    Each column is a run of its own: all rounds of one value, with the client or without it. A
    client that is one round too early in each turn, the mutant, is noticed.
    """
    rounds, apart, trials, noise = 24, 4, 150_000, 6.0
    participation = MinSeparation.of(rounds, apart)
    rows = rows_of(strategy, rounds, trials) / DEVIATION
    move = np.zeros(rounds)
    move[[t - t // apart * early for t in participation.pattern]] = 1.0 / noise
    along = np.linalg.solve(strategy.covariance(rounds), move)
    loss = along @ (rows + move[:, None]) - 0.5 * along @ move
    claimed = strategy.sensitivity(participation) / noise
    epsilon = 0.5 * claimed
    gains = np.maximum(0.0, -np.expm1(epsilon - loss))
    error = float(gains.std()) / math.sqrt(trials)
    delta = stats.norm.cdf(claimed / 2 - epsilon / claimed) - math.exp(epsilon) * stats.norm.cdf(
        -claimed / 2 - epsilon / claimed
    )
    measured = (float(gains.mean()) - delta) / error
    if early and strategy.buffers:
        assert measured > 5
    elif isinstance(strategy, TreeStrategy):  # its estimates tell less than its nodes
        assert measured < 5
    else:
        assert abs(measured) < 5


def matrix_of(column: np.ndarray) -> np.ndarray:
    """The lower-triangular Toeplitz matrix of a first column."""
    return sum((c * np.eye(len(column), k=-j) for j, c in enumerate(column)), start=np.zeros(1))


@pytest.mark.parametrize("strategy", STRATEGIES[1:3], ids=["bands", "blt"])
@pytest.mark.parametrize("dimensions", [1, 40])
def test_rounding_moves_no_more_than_the_effective_multiplier(
    strategy: BandedStrategy | BltStrategy, dimensions: int
) -> None:
    """The worst case: every value of a client's sums is rounded up, and below without the client.

    The grid is so small that an update moves a value by less than a step. Values do not depend on
    each other, so the worst of many draws is taken for each value.
    """
    rounds, draws = 16, 400
    run = RunCorrelation(strategy, MinSeparation.of(rounds, 5))
    allowed = DEVIATION / run.effective_multiplier(DEVIATION, dimensions, 0.0)
    generator, pattern = np.random.default_rng(1), list(run.participation.pattern)
    earlier = matrix_of(strategy.coefficients(rounds)) - np.eye(rounds)
    moved = 1.0 / math.sqrt(dimensions)  # each value, so that an update has the norm 1
    exact = np.rint(generator.normal(0.0, 5.0, (draws, rounds, dimensions))) + 0.5 - 0.5 * moved
    change = np.zeros((rounds, 1))
    change[pattern] = moved
    releases = np.rint(generator.normal(0.0, 9.0, exact.shape))
    shifts = []
    for sums in (np.rint(exact), np.rint(exact + change)):
        noise = releases - sums  # so the fresh noise is noise + rint(what earlier ones give)
        shifts.append(noise + np.rint(earlier @ noise))
    squares = np.square(shifts[0] - shifts[1]).sum(1)
    most = math.sqrt(float(squares.max(0).sum()))
    assert most <= allowed * (1 + 1e-12)
    first_rounding = run.column_norm * (1.0 + math.sqrt(dimensions))
    assert dimensions == 1 or most > first_rounding, "the rounding of later rounds shows"


def test_estimates_of_the_tree_are_functions_of_noisy_sums_alone() -> None:
    """Noise added to sums, or estimates of noisy nodes: the same integers in every round."""
    rounds, size, generator = 24, 50, np.random.default_rng(2)
    sums = generator.integers(-1000, 1000, (rounds, size)).astype(float)
    released = np.cumsum(sums + rows_of(TreeStrategy(rounds), rounds, size), axis=0)

    class NoisyNodes(NoiseSource):
        """The nodes of a round, each its fresh noise plus the sum of its rounds."""

        def __init__(self, step: int) -> None:
            self.step, self.height, self.source = step, 0, fresh(step + 1)

        def fill_(self, values: torch.Tensor) -> torch.Tensor:
            first = self.step + 1 - (1 << self.height)
            self.height += 1
            node = torch.from_numpy(sums[first : self.step + 1].sum(axis=0))
            return self.source.fill_(values).add_(node)

    tree, total = noise_rows(TreeStrategy(rounds), size), np.zeros(size)
    for step in range(rounds):
        total = total + tree.next_row(NoisyNodes(step)).numpy()
        assert np.array_equal(total, released[step])

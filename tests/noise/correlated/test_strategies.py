"""Strategies of correlated noise cost what is claimed: by search, and by jax_privacy."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest

from fedsim.noise.correlated.blt import BltStrategy, optimised_blt
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.noise.correlated.strategies import (
    BandedStrategy,
    NoiseStrategy,
    ToeplitzStrategy,
    TreeStrategy,
    square_root_coefficients,
)

INDEPENDENT = BandedStrategy((1.0,))
BLT = BltStrategy((0.3, 0.15), (0.5, 0.9))
STRATEGIES = [INDEPENDENT, BandedStrategy(square_root_coefficients(4)), BLT, TreeStrategy(11)]


def matrix(strategy: NoiseStrategy, rounds: int) -> np.ndarray:
    """C (numbers, rounds): of a tree, a row for each node that ends within the run."""
    if isinstance(strategy, ToeplitzStrategy):
        column = strategy.coefficients(rounds)
        return sum((c * np.eye(rounds, k=-j) for j, c in enumerate(column)), start=np.zeros(1))
    rows = [
        np.isin(np.arange(rounds), range(first, first + length))
        for length in (1 << height for height in range(rounds.bit_length()))
        for first in range(0, rounds - length + 1, length)
    ]
    return np.array(rows, dtype=float)


def patterns(participation: MinSeparation) -> Iterator[tuple[int, ...]]:
    """Every set of rounds that one client may be in."""
    for count in range(1, participation.max_rounds + 1):
        for chosen in combinations(range(participation.rounds), count):
            if all(b - a >= participation.rounds_apart for a, b in pairwise(chosen)):
                yield chosen


def largest_move(c: np.ndarray, pattern: Sequence[int]) -> float:
    columns = c[:, list(pattern)]
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * len(pattern))).reshape(len(pattern), -1)
    return float(np.linalg.norm(columns @ signs, axis=0).max())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize(("apart", "most"), [(1, 4), (2, None), (3, None), (3, 2), (4, None)])
def test_no_allowed_rounds_of_a_client_move_more_than_the_sensitivity(
    strategy: NoiseStrategy, apart: int, most: int | None
) -> None:
    participation = MinSeparation.of(11, apart, most)
    c, claimed = matrix(strategy, 11), strategy.sensitivity(participation)
    moved = max(largest_move(c, pattern) for pattern in patterns(participation))
    assert moved <= claimed
    slack = 1.15 if isinstance(strategy, TreeStrategy) else 1.0 + 1e-8  # a bound, else exact
    assert claimed <= moved * slack
    generator = np.random.default_rng(0)
    updates = generator.standard_normal((11, 3))  # of any direction, and at most 1 long
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    for pattern in list(patterns(participation))[::7]:
        used = np.zeros((11, 3))
        used[list(pattern)] = updates[list(pattern)]
        assert np.linalg.norm(c @ used) <= claimed


def test_a_client_one_round_too_early_costs_more_than_is_charged() -> None:
    """The mutant: rounds that are one closer than the sensitivity assumes."""
    participation = MinSeparation.of(12, 4)
    for strategy in (BandedStrategy(square_root_coefficients(4)), BLT):
        close = largest_move(matrix(strategy, 12), (0, 3, 7))
        assert close > strategy.sensitivity(participation) * (1 + 1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_the_covariance_is_that_of_the_best_use_of_the_matrix(strategy: NoiseStrategy) -> None:
    covariance = strategy.covariance(11)
    sums = np.tril(np.ones((11, 11)))
    for momentum in (0.9, 0.0):
        updates = np.tril([[momentum ** max(t - s, 0) for s in range(11)] for t in range(11)])
        variances = np.diag(sums @ updates @ covariance @ updates.T @ sums.T)
        assert strategy.prefix_variances(11, momentum) == pytest.approx(variances, rel=1e-9)
    c = matrix(strategy, 11)
    best = np.linalg.inv(c.T @ c)
    if isinstance(strategy, TreeStrategy):  # it waits for no later node, which would help
        assert np.linalg.eigvalsh(covariance - best).min() > -1e-9
        assert np.diag(sums @ best @ sums.T).mean() > 0.6 * variances.mean()
    else:
        assert covariance == pytest.approx(best, abs=1e-9)


JAX_PRIVACY_2_0_0 = {  # (rounds, min separation, buffers): (sensitivity, rms error), of BLT
    (1024, 100, 4): (6.471955, 1.967812),
    (1024, 400, 2): (3.076700, 1.798914),
    (2000, 100, 3): (9.718243, 2.199370),
    (2000, 200, 4): (6.365963, 2.024897),
}
"""Made by `benchmarks/matrix_factors.py`."""


@pytest.mark.parametrize("case", JAX_PRIVACY_2_0_0)
def test_optimised_buffers_are_as_good_as_those_of_jax_privacy(case: tuple[int, int, int]) -> None:
    rounds, apart, buffers = case
    participation = MinSeparation.of(rounds, apart)
    strategy = optimised_blt(buffers, participation)
    measured = strategy.sensitivity(participation), strategy.prefix_error(rounds).rms
    assert measured == pytest.approx(JAX_PRIVACY_2_0_0[case], rel=0.01)
    assert math.prod(measured) <= math.prod(JAX_PRIVACY_2_0_0[case]) * (1 + 1e-3)
    assert strategy.buffer_error(rounds) < 0.01


MOMENTUM_BY_JAX_PRIVACY_2_0_0 = {  # as above, of the models that momentum 0.9 makes
    (1024, 100, 2): (17.432275, 5.490775),
    (2000, 400, 3): (11.394481, 5.302281),
}


@pytest.mark.parametrize("case", MOMENTUM_BY_JAX_PRIVACY_2_0_0)
def test_buffers_for_momentum_are_as_good_as_those_of_jax_privacy(
    case: tuple[int, int, int],
) -> None:
    rounds, apart, buffers = case
    participation, oracle = MinSeparation.of(rounds, apart), MOMENTUM_BY_JAX_PRIVACY_2_0_0[case]
    strategy = optimised_blt(buffers, participation, 0.9)
    measured = strategy.sensitivity(participation), strategy.prefix_error(rounds, 0.9).rms
    assert measured == pytest.approx(oracle, rel=0.01)
    assert math.prod(measured) <= math.prod(oracle) * (1 + 1e-3)
    plain = optimised_blt(buffers, participation)
    lost = plain.sensitivity(participation) * plain.prefix_error(rounds, 0.9).rms
    assert lost > 1.05 * math.prod(measured)


def test_long_runs_have_the_buffers_of_an_optimisation_over_all_coefficients() -> None:
    participation = MinSeparation.of(20_000, 200)
    strategy = optimised_blt(3, participation)
    product = strategy.sensitivity(participation) * strategy.prefix_error(20_000).rms
    assert product <= 89.02288 * (1 + 1e-5)  # of all coefficients: four seconds


@pytest.mark.parametrize(
    ("rounds", "apart", "momentum", "buffers"),
    [(2, 1, 0.99, 2), (3, 2, 0.0, 5), (60, 60, 0.5, 5), (60, 60, 0.99, 2), (200_000, 300, 0.5, 5)],
)
def test_buffers_are_found_for_every_run(
    rounds: int, apart: int, momentum: float, buffers: int
) -> None:
    strategy = optimised_blt(buffers, MinSeparation.of(rounds, apart), momentum)
    assert 0.0 < sum(strategy.scales) <= 1.0


@pytest.mark.parametrize(
    ("rounds", "apart", "bands", "sensitivity", "rms"),
    [  # jax_privacy 2.0.0
        (1024, 100, 100, 5.233364, 2.425177),
        (1024, 200, 128, 3.889100, 2.252805),
        (1024, 400, 128, 2.798269, 2.252805),
        (2000, 100, 100, 7.115268, 3.118582),
    ],
)
def test_bands_have_the_figures_of_jax_privacy(
    rounds: int, apart: int, bands: int, sensitivity: float, rms: float
) -> None:
    strategy = BandedStrategy(square_root_coefficients(bands))
    measured = (
        strategy.sensitivity(MinSeparation.of(rounds, apart)),
        strategy.prefix_error(rounds).rms,
    )
    assert measured == pytest.approx((sensitivity, rms), rel=1e-4)  # coefficients have 16 bits


def test_more_structure_has_less_error_at_the_same_cost() -> None:
    participation = MinSeparation.of(1024, 100)
    error = [
        strategy.sensitivity(participation) * strategy.prefix_error(1024).rms
        for strategy in (optimised_blt(3, participation), TreeStrategy(1024), INDEPENDENT)
    ]
    assert error == sorted(error)
    assert error[0] < 0.2 * error[-1]


@pytest.mark.parametrize(
    ("scales", "decays", "message"),
    [
        ((0.5, 0.6), (0.5, 0.9), "add up to at most 1"),
        ((0.5, -0.1), (0.5, 0.9), "above 0"),
        ((0.5, 0.1), (0.5, 1.0), "below 1"),
        ((0.5,), (0.5,), "2 to 5"),
    ],
)
def test_parameters_without_a_theorem_are_refused(
    scales: tuple[float, ...], decays: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BltStrategy(scales, decays)


@pytest.mark.parametrize("strategy", [BLT, BltStrategy((0.6, 0.1), (0.9, 0.9995))])
def test_buffers_in_float64_are_as_exact_as_is_charged(strategy: BltStrategy) -> None:
    """The largest draws, with the signs that make the last row largest."""
    rounds = 500
    signs = np.where(strategy.inverse(rounds)[::-1] > 0, 1.0, -1.0)
    buffers, exact = np.zeros(2), [Fraction(0)] * 2
    worst = Fraction(0)
    for draw in np.random.default_rng(0).integers(2**30, 2**31, rounds) * signs:
        back = 0.0
        for scale, buffer in zip(strategy.scales, buffers, strict=True):
            back += buffer * scale
        pairs = zip(strategy.scales, exact, strict=True)
        worst = max(worst, abs(Fraction(back) - sum(Fraction(s) * b for s, b in pairs)))
        row = draw - np.rint(back)
        buffers = buffers * np.array(strategy.decays) + row
        exact = [
            Fraction(decay) * b + Fraction(row)
            for decay, b in zip(strategy.decays, exact, strict=True)
        ]
    assert 0 < worst <= strategy.buffer_error(rounds)


def test_long_runs_with_momentum_have_buffers_that_float64_holds() -> None:
    """Bounds grow with the rounds: at 200,000 they are ten times as large, and enough."""
    for buffers in (2, 5):
        strategy = optimised_blt(buffers, MinSeparation.of(20_000, 5000), 0.9)
        assert strategy.buffer_error(20_000) < 0.001
    assert BltStrategy((0.5, 0.5), (0.5, 1.0 - 1e-9)).buffer_error(20_000) < 0.025

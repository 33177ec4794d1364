"""Correlated noise costs what the ledger says: sensitivity, covariance, and no noise used twice.

Statistical checks reject right noise with a probability of at most 1e-9 each.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import stats

from fedsim.accountant import Gaussian, PoissonSampled, SelfComposed
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.correlated_noise import (
    CorrelatedNoise,
    NoiseCorrelation,
    NoiseStates,
    inverse_coefficients,
    square_root_coefficients,
)
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PlanRequest
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.divided_batches import CyclicBatches, CyclicPoisson
from fedsim.clients.training.member import StreamKey
from fedsim.noise.sources import DEVIATION, effective_multiplier

FALSE_ALARM = 1e-9


def matrix(coefficients: Sequence[float], steps: int) -> np.ndarray:
    """C (steps, steps): lower-triangular, Toeplitz and banded."""
    return sum(
        (c * np.eye(steps, k=-j) for j, c in enumerate(coefficients) if j < steps),
        start=np.zeros((steps, steps)),
    )


def patterns(steps: int, separation: int) -> Iterator[tuple[int, ...]]:
    """Every set of steps that are at least `separation` apart, brute force."""
    for count in range(steps + 1):
        for chosen in combinations(range(steps), count):
            if all(b - a >= separation for a, b in pairwise(chosen)):
                yield chosen


def largest_move(coefficients: Sequence[float], pattern: tuple[int, ...], steps: int) -> float:
    """Largest ‖C Δ‖ over Δ of norm at most 1 in the steps of a pattern, by its worst signs."""
    if not pattern:
        return 0.0
    columns = matrix(coefficients, steps)[:, list(pattern)]
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * len(pattern))).reshape(len(pattern), -1)
    return float(np.linalg.norm(columns @ signs, axis=0).max())


@pytest.mark.parametrize("bands", [2, 3, 4])
def test_no_allowed_pattern_moves_more_than_is_charged(bands: int) -> None:
    steps, generator = 9, np.random.default_rng(0)
    correlation = NoiseCorrelation.square_root(bands, steps)
    c, norm = correlation.coefficients, correlation.column_norm
    worst: dict[int, float] = {}
    for pattern in patterns(steps, bands):
        found = largest_move(c, pattern, steps)
        worst[len(pattern)] = max(worst.get(len(pattern), 0.0), found)
        for _ in range(3):  # gradients need not be parallel
            gradients = generator.standard_normal((steps, 4))
            gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
            used = np.zeros((steps, 4))
            used[list(pattern)] = gradients[list(pattern)]
            assert np.linalg.norm(matrix(c, steps) @ used) <= found * (1 + 1e-12)
    for count, moved in worst.items():
        assert moved <= norm * math.sqrt(count) * (1 + 1e-12)
    assert worst[1] == pytest.approx(norm, rel=1e-12)  # and the bound is attained
    close = max(
        largest_move(c, each, steps) for each in patterns(steps, bands - 1) if len(each) > 1
    )
    assert close > worst[2]  # so the distance is needed


@pytest.mark.parametrize("name", ["cyclic", "cyclic_poisson"])
@pytest.mark.parametrize(("examples", "bands"), [(20, 3), (23, 5)])
def test_an_example_has_the_batches_that_are_charged(name: str, examples: int, bands: int) -> None:
    settings = PrivacySettings.model_validate(
        {
            **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0, "sampling": name},
            "noise_correlation": {"name": "toeplitz", "bands": bands},
        }
    )
    local = LocalSettings(steps=3, batch_size=4)
    plan = plan_privacy(PlanRequest(settings, local, examples=examples, planned_rounds=8))
    ((event, count),) = plan.release.charges(0, 3)
    assert isinstance(event, SelfComposed)
    assert count == 1
    key = StreamKey(0, 1, 1)
    batches = key.draw_batches(plan.release_as(DpSgdMechanism).sampling, examples, first_step=0)
    seen: dict[int, list[int]] = {}
    for step in range(24):
        for example in next(batches):
            seen.setdefault(int(example), []).append(step)
    for steps in seen.values():
        assert len(steps) <= event.count
        assert all(b - a >= bands for a, b in pairwise(steps))
    assert len(seen) == examples or name == "cyclic_poisson"


@pytest.mark.parametrize("sampling", [CyclicBatches(4), CyclicPoisson(4, 0.5)])
def test_batches_that_are_too_close_are_refused(sampling: CyclicBatches | CyclicPoisson) -> None:
    correlation = NoiseCorrelation.square_root(5, 20)
    with pytest.raises(ValueError, match="steps apart"):
        DpSgdMechanism(sampling, FlatClipping(1.0), 1.0, 4.0, correlation=correlation)


def shift(
    coefficients: Sequence[float], sums: np.ndarray, releases: np.ndarray, step: int
) -> np.ndarray:
    """s_t: what is known of a release, from the sums (T, d) and the releases before it."""
    back = sum(
        (
            coefficients[j] * (releases[step - j] - sums[step - j])
            for j in range(1, min(step + 1, len(coefficients)))
        ),
        start=np.zeros(sums.shape[1]),
    )
    return sums[step] - np.rint(back)


@pytest.mark.parametrize("bands", [2, 5])
def test_rounding_moves_no_more_than_the_effective_multiplier(bands: int) -> None:
    """Integers of a small grid: rounding is then a large part of what an example moves."""
    generator, c = np.random.default_rng(1), square_root_coefficients(bands)
    correlation = NoiseCorrelation(c, 12)
    moved = 0.0
    for dimensions in (1, 3, 50):
        allowed = DEVIATION / effective_multiplier(
            DEVIATION, dimensions, 0.0, column_norm=correlation.column_norm, bands=bands
        )
        for _ in range(400):
            exact = generator.normal(0.0, 5.0, (12, dimensions))
            change = np.zeros((12, dimensions))
            change[0] = generator.standard_normal(dimensions)
            change[0] /= np.linalg.norm(change[0])  # a clipping bound of one step
            sums, other = np.rint(exact), np.rint(exact + change)
            releases = np.rint(generator.normal(0.0, 9.0, (12, dimensions)))
            found = [shift(c, sums, releases, t) - shift(c, other, releases, t) for t in range(12)]
            norm = float(np.linalg.norm(np.concatenate(found)))
            assert norm <= allowed * (1 + 1e-12)
            moved = max(moved, norm / max(1.0, float(np.linalg.norm(other - sums))))
    assert moved > correlation.column_norm  # so the rounding of later steps has to be charged


def noise(
    coefficients: Sequence[float],
    first: int,
    steps: int,
    *,
    size: int,
    client: int = 3,
    seed: int = 5,
    states: NoiseStates | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Noise (steps, size) of a client from a step on."""
    source = CorrelatedNoise(
        tuple(coefficients),
        StreamKey(seed, client, 1).step_noise,
        like=torch.zeros(size),
        first_step=first,
        states=states or NoiseStates(),
        owner=(seed, client),
    )
    rows = torch.empty(steps, size, dtype=torch.float64)
    for row in rows:
        for part in row.split(chunk or size):
            source.fill_(part)
    source.keep_state()
    return rows


def check_covariance(rows: np.ndarray, coefficients: Sequence[float]) -> None:
    """C y is independent N(0, 1): χ² over all variances and correlations of whitened steps."""
    steps, size = rows.shape
    white = matrix(coefficients, steps) @ rows / DEVIATION
    products = white @ white.T / size
    pairs = products[np.tril_indices(steps, -1)] * math.sqrt(size)
    squares = (np.diag(products) - 1.0) * math.sqrt(size / 2.0)
    statistic = float((pairs**2).sum() + (squares**2).sum())
    assert stats.chi2(len(pairs) + steps).sf(statistic) > FALSE_ALARM


def test_the_covariance_is_that_of_the_matrix_and_no_other() -> None:
    c = square_root_coefficients(4)
    rows = noise(c, 0, 8, size=60_000).numpy()
    check_covariance(rows, c)
    for wrong in range(1, 4):
        other = list(c)
        other[wrong] *= 1.05
        with pytest.raises(AssertionError):
            check_covariance(rows, other)
    expected = inverse_coefficients(c, 8)
    assert rows[-1].std() / DEVIATION == pytest.approx(math.hypot(*expected), rel=0.02)


def test_noise_is_whole_numbers_and_stays_small() -> None:
    for bands in (*range(1, 20), 32, 64, 127, 128):
        inverse = inverse_coefficients(square_root_coefficients(bands), 1000)
        assert np.abs(inverse).sum() < 2.15  # so |y| < 2.15 · 2³⁰ < 2³²
        assert sum(square_root_coefficients(bands)) * 2.0 ** (32 + 16) < 2.0**53
    rows = noise(square_root_coefficients(5), 0, 20, size=1000)
    assert torch.equal(rows, rows.round())


def test_the_state_is_computed_again_bit_for_bit() -> None:
    c = square_root_coefficients(5)
    whole = noise(c, 0, 12, size=1001)
    states = NoiseStates()
    parts = [noise(c, at, 4, size=1001, states=states, chunk=97) for at in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)  # one round after the other in a process
    assert torch.equal(noise(c, 7, 5, size=1001), whole[7:])  # another process, or after a crash
    assert torch.equal(noise(c, 4, 8, size=1001, states=states), whole[4:])  # a repeated round


def test_a_state_that_is_too_large_is_not_kept() -> None:
    c, states = square_root_coefficients(3), NoiseStates(most_bytes=100)
    first = noise(c, 0, 3, size=50, states=states)
    assert not states._states
    assert torch.equal(noise(c, 1, 2, size=50, states=states), first[1:])


def test_fresh_noise_is_used_once() -> None:
    """Between clients, steps and seeds; the correlations of 4,000 values are below 0.12."""
    c = square_root_coefficients(3)
    kept = [
        matrix(c, 5) @ noise(c, 0, 5, size=4000, client=client, seed=seed).numpy()
        for client, seed in ((0, 0), (1, 0), (0, 1))
    ]
    found = np.abs(np.corrcoef(np.concatenate(kept)) - np.eye(15)).max()
    pairs = 15 * 14 / 2
    assert found < stats.norm.isf(FALSE_ALARM / 2 / pairs) / math.sqrt(4000)


def charged(sampling: str, bands: int, delta: float = 1e-3) -> tuple[Any, Any]:
    settings = PrivacySettings.model_validate(
        {
            **{"target_epsilon": 8.0, "delta": delta, "max_grad_norm": 1.0},
            **{"sampling": sampling, "noise_correlation": {"name": "toeplitz", "bands": bands}},
        }
    )
    local = LocalSettings(steps=1, batch_size=50)
    plan = plan_privacy(PlanRequest(settings, local, examples=2500, planned_rounds=250))
    ((event, _),) = plan.release.charges(0, 1)
    return plan, event


@pytest.mark.parametrize("bands", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_dp_accounting_agrees_on_the_run(bands: int) -> None:
    plan, event = charged("cyclic_poisson", bands)
    step = event.event
    assert isinstance(step, PoissonSampled)
    assert isinstance(step.event, Gaussian)
    assert event.count == 250 // bands
    assert step.event.noise_multiplier == pytest.approx(
        plan.release.noise_multiplier / math.hypot(*square_root_coefficients(bands)), rel=1e-9
    )
    oracle = PLDAccountant(value_discretization_interval=1e-3)
    inside = dp.GaussianDpEvent(step.event.noise_multiplier)
    oracle.compose(dp.PoissonSampledDpEvent(step.sampling_rate, inside), event.count)
    assert oracle.get_epsilon(1e-3) == pytest.approx(8.0, abs=3e-3)


@pytest.mark.slow
def test_the_loss_of_the_matrix_mechanism_by_monte_carlo() -> None:
    """δ(8) of C x + Z for an example of one group, with explicit C; five standard errors."""
    bands, steps, trials = 5, 250, 60_000
    plan, event = charged("cyclic_poisson", bands)
    c = matrix(square_root_coefficients(bands), steps)
    z, rate = plan.release.noise_multiplier, event.event.sampling_rate
    chances = np.arange(0, steps, bands)
    generator = np.random.default_rng(2)
    losses = []
    for _ in range(60):
        drawn = np.zeros((steps, trials // 60))
        drawn[chances] = generator.random((len(chances), drawn.shape[1])) < rate
        seen = c @ drawn + z * generator.standard_normal(drawn.shape)
        # log of the mean over the example's two cases of each chance, given the other steps
        inner = c[:, chances].T @ seen - 0.5 * (c[:, chances] ** 2).sum(0)[:, None]
        losses.append(np.log1p(rate * np.expm1(inner / z**2)).sum(0))
    loss = np.concatenate(losses)
    gains = np.maximum(0.0, -np.expm1(8.0 - loss))
    error = float(gains.std()) / math.sqrt(trials)
    assert abs(float(gains.mean()) - 1e-3) < 5 * error
    assert error < 1.5e-4

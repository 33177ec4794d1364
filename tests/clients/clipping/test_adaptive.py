"""The bound follows a quantile, and what it learns from is accounted for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedsim.accountant import Gaussian, JointGaussian, PoissonSampled
from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import FlatClipping, LayerClipping
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, stream_key
from fedsim.noise.sources import NoiseSource, SeededNoise
from fedsim.protocol.noisy_sums import AdaptiveClipNorm


class NoNoise(NoiseSource):
    """Adds nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def fill_(self, values: Tensor) -> Tensor:
        self.asked.append(values.numel())
        return values.zero_()


def step(clipping: AdaptiveClipping, z: float = 1.0, batch: float = 100.0) -> DpSgdMechanism:
    return DpSgdMechanism(PoissonSampling(0.5), clipping, z, batch)


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.squeeze(1)


@dataclass(frozen=True)
class GivenNoise(StreamKey):
    """A client's streams, with the noise that a test gives."""

    source: NoiseSource

    def noise(self, **_: object) -> NoiseSource:
        return self.source


def bounds_of_all(
    ones: Sequence[DpSgdMechanism], x: Tensor, noises: Sequence[NoiseSource], steps: int
) -> np.ndarray:
    """Return the bounds after each step of clients of one block, (steps, clients)."""
    model, public = nn.Linear(x.shape[1], 1, bias=False), torch.ones(2, x.shape[1])
    gradients = gradients_for(model, score, public, torch.zeros(2))
    found: list[list[AdaptiveClipNorm | None]] = []

    def watch(batches: object, released: Tensor, used: Sequence[DpSgdMechanism | None]) -> None:
        found.append([None if one is None else one.clipping.adapted_clip_norm for one in used])

    members = [
        BlockMember(x, torch.zeros(len(x)), GivenNoise(1, k, 1, noise), range(steps), one)
        for k, (one, noise) in enumerate(zip(ones, noises, strict=True))
    ]
    shared = SharedModel(gradients.model, parameters=gradients.parameters)
    local = LocalSettings(steps=steps, batch_size=1)
    result = block_of(shared, gradients.loss, gradients, local, members).train(watch)
    return np.array([*found[1:], result.adapted_clip_norm], dtype=float)


def bounds(one: DpSgdMechanism, x: Tensor, noise: NoiseSource, steps: int) -> list[float]:
    """Return the bound after each step of a client."""
    return bounds_of_all([one], x, [noise], steps)[:, 0].tolist()


def seeded(client: int) -> NoiseSource:
    return SeededNoise(stream_key(2, Purpose.NOISE, client=client))


def test_the_bound_converges_to_the_quantile() -> None:
    """Norms are 1 ... 10 in equal shares; sampled batches, noisy counts; from below and above."""
    x = torch.zeros(400, 2)
    x[:, 0] = torch.linspace(1, 10, 400)
    kinds = [
        AdaptiveClipping.for_batch(200.0, max_grad_norm=start, quantile=quantile)
        for quantile, start in ((0.2, 100.0), (0.9, 0.01))
    ]
    assert {kind.count_noise for kind in kinds} == {10.0}
    ones = [step(kind, z=2.0, batch=200.0) for kind in kinds]
    found = bounds_of_all(ones, x, [seeded(0), seeded(1)], 180)
    # A factor 1000 away, C moves by e^(η γ) a step at worst; then it wanders by a few percent.
    assert found[-120:].mean(axis=0) == pytest.approx([1 + 9 * 0.2, 1 + 9 * 0.9], rel=0.04)


def test_the_update_is_the_published_one() -> None:
    clipping = AdaptiveClipping.flat(2.0, count_noise=3.0, quantile=0.4, learning_rate=0.3)
    noise = NoNoise()
    after = step(clipping).adapt(BatchStatistics(80, 0, (50,)), noise).clipping
    assert isinstance(after, AdaptiveClipping)
    # b̄ = (50 - 80/2) / 100 + 1/2: divided by the expected batch, not by the drawn one; on the
    # grid.
    expected = 2.0 * math.exp(-0.3 * (0.6 - 0.4))
    assert after.bounds[0] == pytest.approx(expected, rel=0.3 * 3.0 * 2**-24 / 100)
    assert after == AdaptiveClipping.flat(after.bounds[0], 3.0, 0.4, 0.3)
    assert noise.asked == [1]


def test_an_empty_batch_leaves_the_count_to_its_noise() -> None:
    clipping = AdaptiveClipping.flat(2.0, count_noise=3.0, quantile=0.5)
    after = step(clipping).adapt(BatchStatistics(0, 0, (0,)), NoNoise()).clipping
    assert after == clipping


@pytest.mark.parametrize("within", [0, 1])
def test_one_example_moves_the_count_by_half(within: int) -> None:
    """So that 2 σ_b is the noise multiplier of the count, absent or present."""
    clipping = AdaptiveClipping.flat(1.0, count_noise=3.0, learning_rate=1.0)
    with_it = step(clipping).adapt(BatchStatistics(8, 0, (5 + within,)), NoNoise()).clipping
    without = step(clipping).adapt(BatchStatistics(7, 0, (5,)), NoNoise()).clipping
    assert isinstance(without, AdaptiveClipping)
    assert isinstance(with_it, AdaptiveClipping)
    moved = math.log(without.bounds[0] / with_it.bounds[0])
    assert moved * 100.0 == pytest.approx(0.5 if within else -0.5)


def test_an_example_that_is_not_finite_is_not_within() -> None:
    x = torch.tensor([[0.1, 0.0], [math.nan, 0.0], [5.0, 0.0]])
    clipping = AdaptiveClipping.flat(1.0, 3.0, learning_rate=1.0)
    (found,) = bounds(DpSgdMechanism(PoissonSampling(1.0), clipping, 1.0, 3.0), x, NoNoise(), 1)
    assert found == pytest.approx(math.exp(0.5 - (1 - 3 / 2) / 3 - 0.5)), "one of three is within"


def test_gradients_and_count_have_the_noise_that_was_asked_for_together() -> None:
    one = step(AdaptiveClipping.flat(0.7, count_noise=5.0), z=1.3)
    z_gradients = 1 / math.sqrt(1.3**-2 - 10.0**-2)
    event = one.event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, JointGaussian)
    assert event.event.noise_multipliers == pytest.approx((z_gradients, 10.0), rel=1e-14)
    assert event.event.noise_multiplier == pytest.approx(1.3, rel=1e-14)
    groups = one.groups(RuleGradients(nn.Linear(4, 1, bias=False), score).parameters)
    assert one.grid_steps(groups) == pytest.approx((z_gradients * 0.7 / 2**24,))


def count_noise_is_plausible(found: np.ndarray, deviation: float) -> bool:
    """Two-sided χ² test of the variance and a test of the mean: a false alarm 2e-4 of the time."""
    scaled = (found**2).sum() / deviation**2
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(found))
    mean = abs(found.mean()) / deviation * math.sqrt(len(found))
    return bool(low < scaled < high) and mean < stats.norm.ppf(1 - 5e-5)


@pytest.mark.parametrize("n_seen", [0, 60])
def test_the_released_count_has_the_noise_that_is_charged(n_seen: int) -> None:
    """Nobody is within C, so what moves log C is the noise alone; 12 % of σ_b are noticed.

    1,500 counts: 150 steps of ten clients; 300 of empty batches.
    """
    n = 60
    x = torch.full((n_seen, 2), 1e12)
    target = 0.0 if n_seen else 0.5  # what the noiseless share is, so that C stays put
    clipping = AdaptiveClipping.for_batch(n, max_grad_norm=1.0, quantile=target)
    one = DpSgdMechanism(PoissonSampling(1.0), clipping, 1.0, n)
    event = one.event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, JointGaussian)
    charged = event.event.noise_multipliers[1] * 0.5
    found = bounds_of_all([one] * 10, x, [seeded(k) for k in range(10)], 150 if n_seen else 30)
    moved = np.diff(np.log(found), axis=0, prepend=0.0)  # from a bound of 1
    count = (-moved / clipping.learning_rate * n).T.ravel()
    assert count_noise_is_plausible(count, charged)
    if n_seen:
        assert not count_noise_is_plausible(1.12 * count, charged)
        assert not count_noise_is_plausible(0.88 * count, charged)
        assert not count_noise_is_plausible(count + 0.5, charged), "a count that is off by a half"
        assert abs(np.corrcoef(count[1:], count[:-1])[0, 1]) < 0.11, "fresh noise in every step"


@pytest.mark.parametrize("bound", [1e-10, 1e-3, 0.7, 50.0, 1e10])
def test_whatever_the_bound_a_step_costs_the_same(
    bound: float, add_clipped_sum: Callable[..., BatchStatistics]
) -> None:
    """A server that sends a wrong bound back spoils the accuracy, never the guarantee."""
    one = step(AdaptiveClipping.flat(0.7, count_noise=5.0), z=1.3)
    resumed = one.resume(bound)
    assert resumed.event == one.event
    assert resumed.clipping.adapted_clip_norm == bound
    gradients = RuleGradients(nn.Linear(4, 1, bias=False), score)
    groups = resumed.groups(gradients.parameters)
    (sigma,) = resumed.standard_deviations(groups)
    assert sigma / groups.sensitivity == pytest.approx(event_multipliers(one)[0], rel=1e-12)
    x = torch.tensor([[1e30, 0, 0, 0], [1e-30, 0, 0, 0], [3.0, 4.0, 0, 0]])
    for example in x:
        into = torch.zeros(4, dtype=torch.float64)
        add_clipped_sum(
            gradients, example[None], torch.zeros(1), resumed.clipping, groups, into, scale=1.0
        )
        assert into.norm() <= bound


def event_multipliers(one: DpSgdMechanism) -> tuple[float, ...]:
    event = one.event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, JointGaussian)
    return event.event.noise_multipliers


@pytest.mark.parametrize("bound", [0.0, 1e-11, 1e11, math.inf, math.nan, -1.0])
def test_a_bound_that_was_never_learnt_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="an adaptive clip norm must be from 1e-10 to 1e\\+10"):
        step(AdaptiveClipping.flat(0.7, count_noise=5.0)).resume(bound)


def test_a_fixed_bound_does_not_go_on_from_a_learnt_one() -> None:
    fixed = DpSgdMechanism(PoissonSampling(0.5), FlatClipping(1.0), 1.0, 10.0)
    assert fixed.resume(None) is fixed
    with pytest.raises(ValueError, match="cannot resume from an adapted one"):
        fixed.resume(0.5)


def test_a_step_for_a_model_has_the_same_event() -> None:
    one = step(AdaptiveClipping.flat(0.7, count_noise=5.0))
    bound = one.for_model(RuleGradients(nn.Linear(4, 1), score).parameters)
    assert event_multipliers(bound) == pytest.approx(event_multipliers(one), rel=1e-6)
    after = bound.adapt(BatchStatistics(80, 0, (80,)), NoNoise())
    assert after.event == bound.event, "the event does not depend on the bound"
    gradients = RuleGradients(nn.Linear(4, 1), score)
    assert after.groups(gradients.parameters).bounds == (after.clipping.adapted_clip_norm,)


@pytest.mark.parametrize("z", [10.0, 12.0])
def test_a_count_that_would_spend_everything_is_refused(z: float) -> None:
    with pytest.raises(ValueError, match=r"count_noise must be > .*, got 5.0: .* larger batches"):
        step(AdaptiveClipping.flat(0.7, count_noise=5.0), z=z)


def test_without_noise_nothing_is_raised() -> None:
    one = step(AdaptiveClipping.flat(0.7, count_noise=5.0), z=0.0)
    assert one.event == PoissonSampled(0.5, JointGaussian((0.0, 10.0)))


def test_the_state_is_the_bound() -> None:
    clipping = AdaptiveClipping.flat(0.7, count_noise=5.0)
    later = clipping.adapt(0.9)
    assert later.bounds < clipping.bounds
    assert clipping.resume(later.adapted_clip_norm) == later


@pytest.mark.parametrize("share", [-1e300, 1e300])
def test_the_bound_stays_a_number(share: float) -> None:
    clipping = AdaptiveClipping.flat(1.0, count_noise=5.0, learning_rate=10.0)
    for _ in range(200):
        clipping = clipping.adapt(share)
    assert 0 < clipping.bounds[0] < math.inf


@pytest.mark.parametrize("clipping", [FlatClipping(1.0), LayerClipping(1.0)])
def test_other_clippings_learn_nothing_and_draw_no_noise(clipping: FlatClipping) -> None:
    noise, one = NoNoise(), DpSgdMechanism(PoissonSampling(0.5), clipping, 1.0, 10.0)
    assert one.adapt(BatchStatistics(3, 0, (2,)), noise) is one
    assert noise.asked == []
    assert one.mechanism == Gaussian(1.0)


@pytest.mark.parametrize(
    "arguments",
    [(0.0, 5.0), (1.0, 0.0), (1.0, math.inf), (1.0, 5.0, 1.1), (1.0, 5.0, 0.5, 0.0)],
)
def test_settings_outside_their_range_are_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaptiveClipping.flat(*arguments)

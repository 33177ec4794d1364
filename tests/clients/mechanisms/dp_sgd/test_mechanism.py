"""The guarantee of one DP-SGD step: on noise, on neighbouring data sets, and against known bugs.

Each promise is a `check_...` function; the mutation tests at the end show that a step with a
well-known bug cannot pass the check that is about it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.accountant import (
    EpochShuffled,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    PldAccountant,
    PoissonSampled,
)
from fedsim.clients.clipping.clipping import (
    Clipping,
    FlatClipping,
    Groups,
    LayerClipping,
    NoiseAllocation,
    PatternClipping,
    group_noise,
)
from fedsim.clients.gradients.per_example import ClippedRows, PaddedBatch, PerExampleGradients
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.divided_batches import ShuffledEpochs
from fedsim.clients.sampling.sampling import FixedSizeSampling, PoissonSampling, Sampling
from fedsim.clients.training import block
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, BlockResult, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, stream_key
from fedsim.noise.release import NoiseRangeError
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise

Batches = Iterator[np.ndarray] | np.random.Generator

Z, C, BATCH = 1.3, 0.5, 8.0
FIRST, SECOND = 90_000, 60_000  # dimensions of the two layers of `Pair`


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def seeded(seed: int = 1) -> SeededNoise:
    return SeededNoise(stream_key(seed, Purpose.NOISE))


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose per-example gradient is the example itself, whatever the weights."""
    return outputs.squeeze(1)


def dirac(size: int = 3) -> RuleGradients:
    return RuleGradients(nn.Linear(size, 1, bias=False), score)


class Pair(nn.Module):
    """Two layers on two parts of an example, each with that part as its gradient."""

    def __init__(self, first: int = FIRST, second: int = SECOND) -> None:
        super().__init__()
        self.first = nn.Linear(first, 1, bias=False)
        self.second = nn.Linear(second, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size = self.first.in_features
        return self.first(x[:, :size]) + self.second(x[:, size:])


FLAT = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(C), Z, BATCH)
BY_DIMENSION = replace(FLAT, clipping=LayerClipping(C, bounds="by_dimension"))
PER_LAYER = replace(FLAT, clipping=LayerClipping(C))
UNEVEN = replace(FLAT, clipping=LayerClipping(C, bounds=(0.3, 0.4)))
EXPLICIT: NoiseAllocation = (1.3 * math.sqrt(3), 1.3 * math.sqrt(1.5))  # z = 1.3 together
STEPS = {
    "flat": FLAT,
    "per layer": PER_LAYER,
    "by dimension": BY_DIMENSION,
    "uneven": UNEVEN,
    "uneven, proportional": replace(UNEVEN, allocation="proportional"),
    "uneven, optimal": replace(UNEVEN, allocation="optimal"),
    "uneven, explicit": replace(UNEVEN, allocation=EXPLICIT),
}


@dataclass(frozen=True)
class GivenStreams(StreamKey):
    """A client's batches and noise, as a test gives them."""

    given_batches: Batches
    source: NoiseSource

    def draw_batches(
        self, sampling: Sampling, num_examples: int, *, first_step: int, **_: object
    ) -> Any:
        if isinstance(self.given_batches, Iterator):
            return self.given_batches
        return sampling.draw_batches(
            num_examples, self.given_batches, epochs=self.epoch, first_step=first_step
        )

    def noise(self, **_: object) -> NoiseSource:
        return self.source


def trained(
    step: DpSgdMechanism,
    x: Tensor,
    *,
    gradients: PerExampleGradients | None = None,
    batches: Batches | None = None,
    noise: NoiseSource | None = None,
    steps: int = 1,
    lr: float = 1e-30,
) -> tuple[list[int], Tensor, BlockResult]:
    """Train a client alone; return its batches' sizes, its releases and its result."""
    gradients = gradients or dirac(x.shape[1])
    sizes, releases = [], []

    def watch(batches: Any, released: Tensor, mechanisms: object) -> None:
        sizes.append(len(batches[0]))
        releases.append(released[0].clone())

    local = LocalSettings(steps=steps, batch_size=1, optimizer=SgdSettings(name="sgd", lr=lr))
    streams = GivenStreams(0, 0, 1, batches or stream(), noise or seeded())
    member = BlockMember(x, torch.zeros(len(x)), streams, range(steps), step)
    shared = SharedModel(gradients.model, parameters=gradients.parameters)
    result = block_of(shared, gradients.loss, gradients, local, [member]).train(watch)
    return sizes, torch.stack(releases), result


def released(step: DpSgdMechanism, x: Tensor, **given: Any) -> Tensor:
    return trained(step, x, **given)[1][0]


# --- What a step promises -------------------------------------------------------------------------


def check_noise(
    step: DpSgdMechanism, *, claimed: DpSgdMechanism | None = None, examples: int = 4
) -> None:
    """On zero gradients each group has the noise of the claimed step, within 4 standard errors.

    That is a false-alarm rate of 6e-5 a group, and seeds are fixed.
    """
    claimed = claimed or step
    gradients = RuleGradients(Pair(), score)
    gradient = released(step, torch.zeros(examples, FIRST + SECOND), gradients=gradients) * BATCH
    groups = claimed.clipping.groups(gradients.parameters)
    sigmas = claimed.standard_deviations(groups)
    places = gradients.parameters.slices(range(2))
    for members, sigma in zip(groups.members, sigmas, strict=True):
        values = torch.cat([gradient[places[i]] for i in members]) / sigma
        assert abs(values.std().item() - 1) < 4 / math.sqrt(2 * len(values))
        assert abs(values.mean().item()) < 4 / math.sqrt(len(values))


def check_sensitivity(step: DpSgdMechanism) -> None:
    """One example more moves the release by its clipped gradient over the public batch: ≤ C / L."""
    x = torch.tensor([[0.0, 0.0, 0.1], [0.2, 0.0, 0.0]])
    for extra in ([0.0, 900.0, 0.0], [0.0, 0.01, 0.0], [math.nan, 1.0, 0.0], [1e30, 1e30, 1e30]):
        gradient = torch.tensor(extra)
        fewer, more = released(step, x), released(step, torch.cat([x, gradient.unsqueeze(0)]))
        moved = (more - fewer) * step.expected_batch
        norm = gradient.double().norm().item()
        expected = torch.zeros(3)
        if math.isfinite(norm):
            expected = gradient * min(1.0, C / norm)
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


def check_neighbours_share_noise(step: DpSgdMechanism) -> None:
    """N and N + 1 examples, the same public settings: all that is drawn for the noise is equal."""

    def ten_releases(examples: int) -> Tensor:
        x = torch.zeros(examples, 50)
        return trained(step, x, batches=stream(3), noise=seeded(4), steps=10)[1]

    assert torch.equal(ten_releases(20), ten_releases(21))


@pytest.mark.parametrize("name", STEPS)
def test_noise_has_the_promised_deviation_in_each_group(name: str) -> None:
    step = STEPS[name]
    check_noise(step)
    for factor in (1.03, 0.97):
        allocation = step.allocation
        if isinstance(allocation, tuple):
            allocation = tuple(factor * z for z in allocation)
        wrong = replace(step, noise_multiplier=Z * factor, allocation=allocation)
        with pytest.raises(AssertionError):
            check_noise(wrong, claimed=step)


def test_noise_too_small_for_the_grid_is_refused() -> None:
    least = 4 * BATCH * 2.0**24 / 2.0**51
    parameters = dirac().parameters
    assert replace(FLAT, noise_multiplier=1.01 * least).for_model(parameters)
    with pytest.raises(NoiseRangeError, match="cut off at the end of the grid; set a noise_mult"):
        replace(FLAT, noise_multiplier=0.99 * least).for_model(parameters)
    x = torch.tensor([[0.3, 0.0, 0.1]])
    kept = released(replace(FLAT, noise_multiplier=1.01 * least), x) * BATCH
    torch.testing.assert_close(kept, x[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_groups_together_are_one_gaussian_with_z(name: str) -> None:
    step = STEPS[name]
    parameters = RuleGradients(Pair(), score).parameters
    groups = step.clipping.groups(parameters)
    sigmas = step.standard_deviations(groups)
    together = sum((c / s) ** 2 for c, s in zip(groups.bounds, sigmas, strict=True)) ** -0.5
    assert together == pytest.approx(Z, rel=1e-12)
    bound = step.for_model(parameters)
    assert isinstance(bound.event, PoissonSampled)
    mechanism = bound.event.event
    if name == "flat":
        assert isinstance(mechanism, Gaussian)
        assert mechanism.noise_multiplier == bound.effective_noise_multiplier
        return
    assert isinstance(mechanism, JointGaussian)
    assert mechanism.noise_multipliers == pytest.approx(
        [s / c for c, s in zip(groups.bounds, sigmas, strict=True)], rel=1e-3
    )
    one = PldAccountant().compose(PoissonSampled(0.1, mechanism), 100).get_epsilon(1e-5)
    flat = PldAccountant().compose(PoissonSampled(0.1, Gaussian(Z)), 100).get_epsilon(1e-5)
    assert flat < one < flat * (1 + 1e-3), "the grid of 150,000 values costs a little"


def energy(step: DpSgdMechanism, groups: Groups) -> float:
    sigmas = step.standard_deviations(groups)
    return sum(d * s**2 for d, s in zip(groups.dimensions, sigmas, strict=True))


def test_allocations() -> None:
    groups = UNEVEN.clipping.groups(RuleGradients(Pair(), score).parameters)
    assert UNEVEN.standard_deviations(groups) == (Z * 0.5, Z * 0.5)
    assert STEPS["uneven, proportional"].standard_deviations(groups) == pytest.approx(
        (Z * math.sqrt(2) * 0.3, Z * math.sqrt(2) * 0.4)
    )
    least = energy(STEPS["uneven, optimal"], groups)
    roots = 0.3 * math.sqrt(FIRST) + 0.4 * math.sqrt(SECOND)
    assert least == pytest.approx((Z * roots) ** 2)
    assert least < min(energy(STEPS[n], groups) for n in ("uneven", "uneven, explicit"))
    even = BY_DIMENSION.clipping.groups(RuleGradients(Pair(), score).parameters)
    optimal = replace(BY_DIMENSION, allocation="optimal").standard_deviations(even)
    assert optimal == pytest.approx(BY_DIMENSION.standard_deviations(even))


def test_one_gaussian_draw_serves_neighbours_with_the_same_noise() -> None:
    """Groups of one σ are drawn in one go: the noise is the one of flat clipping."""
    gradients = RuleGradients(Pair(30, 20), score)
    x = torch.zeros(2, 50)
    flat = released(FLAT, x, gradients=gradients)
    layers = released(UNEVEN, x, gradients=gradients)
    assert torch.equal(flat, layers)


def test_interleaved_groups_are_drawn_in_place() -> None:
    """Biases and weights alternate in the flat tensor; each gets its group's noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 500))
    step = replace(
        FLAT,
        clipping=PatternClipping(("*.bias", "*"), (0.3, 0.4)),
        allocation="proportional",
    )
    gradients = RuleGradients(model, lambda outputs, targets: outputs.sum(1))
    gradient = released(step, torch.zeros(0, 300), gradients=gradients) * BATCH
    parts = gradients.parameters.views(gradient)
    for index, bound in enumerate((0.4, 0.3, 0.4, 0.3)):
        values = parts[index] / (Z * math.sqrt(2) * bound)
        assert abs(values.std().item() - 1) < 4 / math.sqrt(2 * values.numel())


def correlation(one: Tensor, other: Tensor) -> float:
    return abs(float(np.corrcoef(one.numpy(), other.numpy())[0, 1])) * math.sqrt(len(one))


@pytest.mark.parametrize("source", [seeded, lambda seed: SecureNoise()])
def test_steps_and_layers_have_independent_noise(source: Callable[[int], NoiseSource]) -> None:
    """Within a round; clients, rounds and seeds are in test_noise.py. 5.5 standard errors: 4e-8."""
    gradients, noise, batches = RuleGradients(Pair(), score), source(1), stream()
    x = torch.zeros(3, FIRST + SECOND)
    steps = trained(UNEVEN, x, gradients=gradients, batches=batches, noise=noise, steps=3)[1]
    for i in range(3):
        assert correlation(steps[i], steps[i - 1]) < 5.5
        assert correlation(steps[i][:SECOND], steps[i][FIRST:]) < 5.5


@pytest.mark.parametrize("examples", [0, 1, 500])
def test_noise_is_added_once_whatever_the_batch(examples: int) -> None:
    check_noise(FLAT, examples=min(examples, 4))
    assert torch.equal(released(FLAT, torch.zeros(examples, 3)), released(FLAT, torch.zeros(2, 3)))


def test_a_step_has_sensitivity_c() -> None:
    check_sensitivity(FLAT)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("clipping", [FlatClipping(C), LayerClipping(C)])
def test_neighbours_share_noise_normaliser_and_steps(rate: float, clipping: Clipping) -> None:
    check_neighbours_share_noise(DpSgdMechanism(PoissonSampling(rate), clipping, Z, BATCH))


def test_a_model_is_moved_by_its_release_and_nothing_else() -> None:
    gradients = dirac()
    before = gradients.parameters.data.clone()
    _, releases, result = trained(FLAT, torch.ones(5, 3), gradients=gradients, lr=0.5)
    torch.testing.assert_close(result.values[0], before - 0.5 * releases[0])


def test_a_step_is_the_event_that_is_charged() -> None:
    step = DpSgdMechanism(PoissonSampling(0.2), FlatClipping(0.5), 1.1, 10.0)
    assert step.event == PoissonSampled(0.2, Gaussian(1.1))
    assert step.charges(7, 3) == [(step.event, 3)]
    fixed = replace(step, sampling=FixedSizeSampling(50, 10))
    assert fixed.charges(7, 3) == [(FixedSizeSampled(50, 10, Gaussian(1.1)), 3)]
    epochs = replace(step, sampling=ShuffledEpochs(5))
    assert epochs.charges(0, 12) == [(EpochShuffled(5, Gaussian(1.1)), 3)]


def test_standard_deviation_is_z_times_the_sensitivity() -> None:
    groups = Groups(((0,), (1,)), (0.3, 0.4), (10, 20))
    assert FLAT.standard_deviations(groups) == pytest.approx([Z * 0.5] * 2)
    nothing = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(math.inf), 0.0, 1.0)
    assert nothing.standard_deviations(Groups(((0,),), (math.inf,), (1,))) == (0.0,)


@pytest.mark.parametrize("allocation", ["uniform", "proportional", "optimal", (Z,)])
def test_one_group_has_noise_z_c(allocation: NoiseAllocation) -> None:
    one, unbounded = Groups(((0,),), (C,), (3,)), Groups(((0,),), (math.inf,), (3,))
    assert group_noise(allocation, Z, one) == pytest.approx((Z * C,))
    assert group_noise(allocation, 0.0, unbounded) == (0.0,)
    with pytest.raises(ValueError, match="needs a finite max_grad_norm"):
        group_noise(allocation, Z, unbounded)


@pytest.mark.parametrize(("bound", "total"), [(1.0, [1.0, 0.0, 1.0]), (math.inf, [3.0, 0.0, 4.0])])
def test_without_noise_a_step_is_the_clipped_sum_and_epsilon_is_infinite(
    bound: float, total: list[float]
) -> None:
    step = replace(FLAT, clipping=FlatClipping(bound), noise_multiplier=0.0)
    x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 4.0], [0.0, math.nan, 0.0], [0.0, math.inf, 0.0]])
    torch.testing.assert_close(released(step, x) * BATCH, torch.tensor(total), rtol=1e-5, atol=0.0)
    assert step.event == PoissonSampled(1.0, Gaussian(0.0))
    assert PldAccountant().compose(step.event).get_epsilon(1e-5) == math.inf


def test_empty_batches_are_charged_and_noisy() -> None:
    """Rate 0.01 of one example: most batches are empty; each step releases and is charged."""
    step = DpSgdMechanism(PoissonSampling(0.01), FlatClipping(C), Z, BATCH)
    sizes, releases, _ = trained(
        step,
        torch.ones(1, 100),
        batches=stream(1),
        noise=seeded(2),
        gradients=dirac(100),
        steps=200,
    )
    assert (releases[1:] != releases[:-1]).all()
    assert releases.all()
    assert 0 < sum(sizes) < 10
    assert step.charges(0, 200) == [(PoissonSampled(0.01, Gaussian(Z)), 200)]


def iterate(*batches: list[int]) -> Iterator[np.ndarray]:
    return iter([np.array(batch, dtype=np.int64) for batch in batches])


def test_a_release_is_about_the_batch_alone() -> None:
    x = torch.eye(3) * 0.1
    step = replace(FLAT, noise_multiplier=0.0)
    gradient = released(step, x, batches=iterate([0, 2]))
    torch.testing.assert_close(gradient * BATCH, torch.tensor([0.1, 0.0, 0.1]))


def test_splitting_bounds_the_batch_and_adds_up() -> None:
    seen: list[tuple[int, int]] = []

    class Spy(RuleGradients):
        def clipped(self, values: Tensor, padded: PaddedBatch, clip: Any) -> ClippedRows:
            seen.append((len(padded.features), int(padded.weights.sum())))
            return super().clipped(values, padded, clip)

    x = torch.tensor([[0.1], [9.0], [math.nan], [0.2], [0.3]])
    spy = Spy(nn.Linear(1, 1, bias=False), score)
    split = replace(FLAT, max_physical_batch=2, noise_multiplier=0.0)
    total = released(split, x, gradients=spy).item() * BATCH
    assert seen == [(1, 1)] * 5, "padded batches have a multiple of 8 rows, or one"
    assert total == pytest.approx(0.1 + C + 0.2 + 0.3, rel=1e-5)


def test_a_batch_of_several_tiles_counts_each_example_once() -> None:
    """More examples than the usual batch has, so that the release needs three padded batches."""
    x = torch.diag(torch.linspace(0.01, 0.4, 40))
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(C), 0.0, BATCH, max_physical_batch=16)
    assert -(-len(x) // step.padded_rows) > 1
    torch.testing.assert_close(released(step, x) * BATCH, x.diag(), rtol=2e-6, atol=0)


def test_a_step_for_another_model_is_refused() -> None:
    step = FLAT.for_model(dirac(3).parameters)
    with pytest.raises(ValueError, match="for a model with 3 values, got one with 4"):
        released(step, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_batch": 0.0}, "expected_batch must be > 0"),
        ({"expected_batch": math.inf}, "expected_batch must be > 0"),
        ({"max_physical_batch": 0}, "max_physical_batch must be >= 1"),
        ({"allocation": (1.3, 1.3)}, r"have 0\.919238815\d* together"),
        ({"allocation": (1.3, 0.0)}, "have 0 together"),
    ],
)
def test_steps_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FLAT, **changes)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (replace(FLAT, allocation=EXPLICIT), "for each of the 1 groups, got 2"),
        (replace(FLAT, clipping=FlatClipping(math.inf)), "needs a finite max_grad_norm"),
        (replace(FLAT, clipping=PatternClipping(("x",), (C,))), "is in no group"),
    ],
)
def test_a_step_that_does_not_fit_a_model_is_refused(step: DpSgdMechanism, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step.for_model(dirac().parameters)


# --- Mutations: known bugs, each caught by the check that is about it -----------------------------


class NoClip(FlatClipping):
    def clip_factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        return torch.ones_like(norms)


def test_mutation_no_clipping_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_sensitivity(replace(FLAT, clipping=NoClip(C)))


class TooLittleNoise(DpSgdMechanism):
    def standard_deviations(self, groups: Groups) -> tuple[float, ...]:
        return tuple(sigma / math.sqrt(2) for sigma in super().standard_deviations(groups))


def test_mutation_too_little_noise_is_caught() -> None:
    fields = {name: getattr(FLAT, name) for name in FLAT.__dataclass_fields__}
    with pytest.raises(AssertionError):
        check_noise(TooLittleNoise(**fields), claimed=FLAT)


def test_mutation_noise_for_each_physical_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step, noise = replace(FLAT, max_physical_batch=2), seeded()
    whole = ClippedRows.add_to
    check_noise(step, examples=4)

    def noisy(self: ClippedRows, into: Any, part: Any) -> None:
        for one in into:
            one += noise.fill_(torch.empty(one.shape, dtype=torch.float64))
        whole(self, into, part)

    monkeypatch.setattr(ClippedRows, "add_to", noisy)
    with pytest.raises(AssertionError):
        check_noise(step, examples=4)


@pytest.fixture
def changed_release(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Let a function change the releases of a block: of its batches, its members and a release."""
    step, use = block._DpSgdBlock.take_step, block._DpSgdBlock.use_gradients
    seen: list[Any] = []

    def change(how: Callable[..., None]) -> None:
        def taken(self: Any, batches: Any) -> None:
            seen[:] = batches
            step(self, batches)

        def changed(self: Any, clients: slice, release: Any) -> None:
            how(seen[0], self.members[0], release)
            use(self, clients, release)

        monkeypatch.setattr(block._DpSgdBlock, "take_step", taken)
        monkeypatch.setattr(block._DpSgdBlock, "use_gradients", changed)

    return change


def test_mutation_dividing_by_the_drawn_batch_is_caught(
    changed_release: Callable[..., None],
) -> None:
    """Opacus #571: the release depends on how many examples there are."""
    changed_release(lambda batch, member, release: release.mul_(BATCH / max(1, len(batch))))
    with pytest.raises(AssertionError):
        check_neighbours_share_noise(FLAT)
    with pytest.raises(AssertionError):
        check_sensitivity(FLAT)


def test_mutation_a_normaliser_from_private_sizes_is_caught(
    changed_release: Callable[..., None],
) -> None:
    """The normaliser is q N with the private N."""
    changed_release(
        lambda batch, member, release: release.mul_(BATCH / max(1, len(member.features)))
    )
    with pytest.raises(AssertionError):
        check_neighbours_share_noise(FLAT)


def test_mutation_skipping_empty_batches_is_caught(changed_release: Callable[..., None]) -> None:
    check_noise(FLAT, examples=0)
    changed_release(lambda batch, member, release: None if len(batch) else release.zero_())
    with pytest.raises(AssertionError):
        check_noise(FLAT, examples=0)

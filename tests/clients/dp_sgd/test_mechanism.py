"""The guarantee of one DP-SGD step: on noise, on neighbouring data sets, and against known bugs.

Each promise is a `check_...` function; the mutation tests at the end show that a step with a
well-known bug cannot pass the check that is about it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedsim.accountant import (
    EpochShuffled,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    PldAccountant,
    PoissonSampled,
)
from fedsim.clients.dp_sgd.clipping import Clipping, FlatClipping, GroupClipping, Groups
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism, Lots
from fedsim.clients.dp_sgd.noise import NoiseSource, SecureNoise, SeededNoise
from fedsim.clients.dp_sgd.noise_allocation import NoiseAllocation, group_noise
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients, Tile
from fedsim.clients.dp_sgd.per_example.rule_gradients import RuleGradients
from fedsim.clients.dp_sgd.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs
from fedsim.core.streams import Purpose, stream_key

Z, C, LOT = 1.3, 0.5, 8.0
FIRST, SECOND = 300_000, 200_000  # dimensions of the two layers of `Pair`


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


FLAT = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(C), Z, LOT)
BY_DIMENSION = replace(FLAT, clipping=GroupClipping(C, bounds="by_dimension"))
PER_LAYER = replace(FLAT, clipping=GroupClipping(C))
UNEVEN = replace(FLAT, clipping=GroupClipping(C, bounds=(0.3, 0.4)))
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


def released(
    step: DpSgdMechanism,
    x: Tensor,
    *,
    gradients: PerExampleGradients | None = None,
    lots: Lots | None = None,
    noise: NoiseSource | None = None,
) -> Tensor:
    gradients = gradients or dirac(x.shape[1])
    into = torch.full_like(gradients.parameters.data, float("nan"))
    step.release(
        gradients,
        x,
        torch.zeros(len(x)),
        lots=lots or stream(),
        noise=noise or seeded(),
        into=into,
    )
    return into


# --- What a step promises -------------------------------------------------------------------------


def check_noise(
    step: DpSgdMechanism, *, claimed: DpSgdMechanism | None = None, examples: int = 4
) -> None:
    """On zero gradients each group has the noise of the claimed step, within 4 standard errors.

    That is a false-alarm rate of 6e-5 a group, and seeds are fixed.
    """
    claimed = claimed or step
    gradients = RuleGradients(Pair(), score)
    gradient = released(step, torch.zeros(examples, FIRST + SECOND), gradients=gradients) * LOT
    groups = claimed.clipping.groups(gradients.parameters)
    sigmas = claimed.standard_deviations(groups)
    places = gradients.parameters.slices(range(2))
    for members, sigma in zip(groups.members, sigmas, strict=True):
        values = torch.cat([gradient[places[i]] for i in members]) / sigma
        assert abs(values.std().item() - 1) < 4 / math.sqrt(2 * len(values))
        assert abs(values.mean().item()) < 4 / math.sqrt(len(values))


def check_sensitivity(step: DpSgdMechanism) -> None:
    """One example more moves the release by its clipped gradient over the public lot: ≤ C / L."""
    x = torch.tensor([[0.0, 0.0, 0.1], [0.2, 0.0, 0.0]])
    for extra in ([0.0, 900.0, 0.0], [0.0, 0.01, 0.0], [math.nan, 1.0, 0.0], [1e30, 1e30, 1e30]):
        gradient = torch.tensor(extra)
        fewer, more = released(step, x), released(step, torch.cat([x, gradient.unsqueeze(0)]))
        moved = (more - fewer) * step.expected_lot
        norm = gradient.double().norm().item()
        expected = torch.zeros(3)
        if math.isfinite(norm):
            expected = gradient * min(1.0, C / norm)
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


def check_neighbours_share_noise(step: DpSgdMechanism) -> None:
    """N and N + 1 examples, the same public settings: all that is drawn for the noise is equal."""

    def ten_releases(examples: int) -> Tensor:
        lots, noise, x = stream(3), seeded(4), torch.zeros(examples, 50)
        return torch.stack([released(step, x, lots=lots, noise=noise) for _ in range(10)])

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


@pytest.mark.parametrize("noise", [seeded(), SecureNoise()])
def test_noise_is_normal(noise: NoiseSource) -> None:
    gradient = released(FLAT, torch.zeros(1, FIRST), noise=noise)
    assert stats.kstest(gradient.numpy() * LOT / (Z * C), "norm").pvalue > 1e-7


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
        assert mechanism == Gaussian(Z)
        return
    assert isinstance(mechanism, JointGaussian)
    assert mechanism.noise_multipliers == pytest.approx(
        [s / c for c, s in zip(groups.bounds, sigmas, strict=True)]
    )
    one = PldAccountant().compose(PoissonSampled(0.1, mechanism), 100).get_epsilon(1e-5)
    flat = PldAccountant().compose(PoissonSampled(0.1, Gaussian(Z)), 100).get_epsilon(1e-5)
    assert one == pytest.approx(flat, rel=1e-6)


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
        clipping=GroupClipping(C, patterns=("*.bias", "*"), bounds=(0.3, 0.4)),
        allocation="proportional",
    )
    gradients = RuleGradients(model, lambda outputs, targets: outputs.sum(1))
    gradient = released(step, torch.zeros(0, 300), gradients=gradients) * LOT
    parts = gradients.parameters.views(gradient)
    for index, bound in enumerate((0.4, 0.3, 0.4, 0.3)):
        values = parts[index] / (Z * math.sqrt(2) * bound)
        assert abs(values.std().item() - 1) < 4 / math.sqrt(2 * values.numel())


def correlation(one: Tensor, other: Tensor) -> float:
    return abs(float(np.corrcoef(one.numpy(), other.numpy())[0, 1])) * math.sqrt(len(one))


@pytest.mark.parametrize("source", [seeded, lambda seed: SecureNoise()])
def test_steps_and_layers_have_independent_noise(source: Callable[[int], NoiseSource]) -> None:
    """Within a round; clients, rounds and seeds are in test_noise.py. 5.5 standard errors: 4e-8."""
    gradients, noise, lots = RuleGradients(Pair(), score), source(1), stream()
    x = torch.zeros(3, FIRST + SECOND)
    steps = [
        released(UNEVEN, x, gradients=gradients, lots=lots, noise=noise).clone() for _ in range(3)
    ]
    for i in range(3):
        assert correlation(steps[i], steps[i - 1]) < 5.5
        assert correlation(steps[i][:SECOND], steps[i][FIRST:]) < 5.5


@pytest.mark.parametrize("examples", [0, 1, 500])
def test_noise_is_added_once_whatever_the_lot(examples: int) -> None:
    check_noise(FLAT, examples=min(examples, 4))
    assert torch.equal(released(FLAT, torch.zeros(examples, 3)), released(FLAT, torch.zeros(2, 3)))


def test_a_step_has_sensitivity_c() -> None:
    check_sensitivity(FLAT)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("clipping", [FlatClipping(C), GroupClipping(C)])
def test_neighbours_share_noise_normaliser_and_steps(rate: float, clipping: Clipping) -> None:
    check_neighbours_share_noise(DpSgdMechanism(PoissonSampling(rate), clipping, Z, LOT))


def test_a_step_does_not_move_the_model_itself() -> None:
    gradients = dirac()
    before = gradients.parameters.data.clone()
    released(FLAT, torch.ones(5, 3), gradients=gradients)
    assert torch.equal(gradients.parameters.data, before)


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
    assert FLAT.standard_deviation(groups) == pytest.approx(Z * 0.5)
    with pytest.raises(ValueError, match="use standard_deviations"):
        replace(FLAT, allocation="proportional").standard_deviation(groups)
    nothing = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(math.inf), 0.0, 1.0)
    assert nothing.standard_deviation(Groups(((0,),), (math.inf,))) == 0.0


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
    torch.testing.assert_close(released(step, x) * LOT, torch.tensor(total), rtol=2e-6, atol=0.0)
    assert step.event == PoissonSampled(1.0, Gaussian(0.0))
    assert PldAccountant().compose(step.event).get_epsilon(1e-5) == math.inf


def test_empty_lots_are_charged_and_noisy() -> None:
    """Rate 0.01 of one example: nearly every lot is empty; each step releases, each is charged."""
    step = DpSgdMechanism(PoissonSampling(0.01), FlatClipping(C), Z, LOT)
    lots, noise, gradients, sizes = stream(1), seeded(2), dirac(100), []
    into = torch.zeros(100)
    for _ in range(200):
        before = into.clone()
        statistics = step.release(
            gradients, torch.ones(1, 100), torch.zeros(1), lots=lots, noise=noise, into=into
        )
        sizes.append(statistics.examples)
        assert (into != before).all()
    assert 0 < sum(sizes) < 10
    assert step.charges(0, 200) == [(PoissonSampled(0.01, Gaussian(Z)), 200)]


def iterate(*lots: list[int]) -> Iterator[np.ndarray]:
    return iter([np.array(lot, dtype=np.int64) for lot in lots])


def test_lots_come_from_an_iterator_or_a_stream() -> None:
    x = torch.eye(3) * 0.1
    step = replace(FLAT, noise_multiplier=0.0)
    gradient = released(step, x, lots=iterate([0, 2]))
    torch.testing.assert_close(gradient * LOT, torch.tensor([0.1, 0.0, 0.1]))
    shuffled = replace(step, sampling=ShuffledEpochs(3))
    with pytest.raises(TypeError, match="take its lots from `lots`"):
        released(shuffled, x, lots=stream())


@pytest.mark.parametrize("physical", [1, 3, 7, 100])
def test_splitting_a_lot_changes_nothing(physical: int) -> None:
    """One noise draw, one charge, the same sum but for the order of additions."""
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    step = DpSgdMechanism(PoissonSampling(0.7), FlatClipping(C), Z, LOT)
    split = replace(step, max_physical_batch=physical)
    assert split.charges(0, 1) == step.charges(0, 1)
    lots, noise = (stream(1), stream(1)), (seeded(2), seeded(2))
    for _ in range(5):
        whole = released(step, x, lots=lots[0], noise=noise[0])
        parts = released(split, x, lots=lots[1], noise=noise[1])
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)


def test_splitting_bounds_the_batch_and_adds_up_what_happened() -> None:
    seen: list[tuple[int, int]] = []

    class Spy(RuleGradients):
        def add_clipped_sums(self, values: Tensor, tile: Tile, *args: object):  # type: ignore[override]
            seen.append((len(tile.features), int(tile.weights.sum())))
            return super().add_clipped_sums(values, tile, *args)  # type: ignore[arg-type]

    x = torch.tensor([[0.1], [9.0], [math.nan], [0.2], [0.3]])
    spy = Spy(nn.Linear(1, 1, bias=False), score)
    into = torch.zeros(1)
    statistics = replace(FLAT, max_physical_batch=2, noise_multiplier=0.0).release(
        spy, x, torch.zeros(5), lots=stream(), noise=seeded(), into=into
    )
    assert seen == [(1, 1)] * 5, "tiles have a multiple of 8 rows, or one"
    assert statistics == LotStatistics(5, 1, (3,))
    assert into.item() * LOT == pytest.approx(0.1 + C + 0.2 + 0.3, rel=1e-5)


def test_a_lot_of_several_tiles_counts_each_example_once() -> None:
    """More examples than the usual lot has, so that the release needs three tiles."""
    x = torch.diag(torch.linspace(0.01, 0.4, 40))
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(C), 0.0, LOT, max_physical_batch=16)
    assert -(-len(x) // step.tile_rows) > 1
    torch.testing.assert_close(released(step, x) * LOT, x.diag(), rtol=2e-6, atol=0)


def test_a_step_for_another_model_is_refused() -> None:
    step = FLAT.for_model(dirac(3).parameters)
    with pytest.raises(ValueError, match="for a model with 3 values, got one with 4"):
        released(step, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_lot": 0.0}, "expected_lot must be > 0"),
        ({"expected_lot": math.inf}, "expected_lot must be > 0"),
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
        (replace(FLAT, clipping=GroupClipping(C, patterns=("x",))), "no pattern fits"),
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
    def fill_with_noise(self, parameters, noise, into) -> Groups:
        groups = super().fill_with_noise(parameters, noise, into)
        into /= math.sqrt(2)
        return groups


def test_mutation_too_little_noise_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_noise(mutated(TooLittleNoise), claimed=FLAT)


class NoisePerPhysicalBatch(DpSgdMechanism):
    """Sums releases of the parts: one noise draw for each."""

    def release(self, gradients, features, targets, *, lots, noise, into) -> LotStatistics:
        total, statistics = torch.zeros_like(into), LotStatistics(0, 0, (0,))
        for part in range(0, len(features), self.max_physical_batch or 1):
            rows = slice(part, part + (self.max_physical_batch or 1))
            statistics = super().release(
                gradients, features[rows], targets[rows], lots=lots, noise=noise, into=into
            )
            total += into
        into.copy_(total)
        return statistics


def test_mutation_noise_for_each_physical_batch_is_caught() -> None:
    check_noise(replace(FLAT, max_physical_batch=2), examples=4)
    with pytest.raises(AssertionError):
        check_noise(mutated(NoisePerPhysicalBatch, max_physical_batch=2), examples=4)


class DividesByTheDrawnLot(DpSgdMechanism):
    """Opacus #571: the release depends on how many examples there are."""

    def release(self, gradients, features, targets, *, lots, noise, into) -> LotStatistics:
        statistics = super().release(
            gradients, features, targets, lots=lots, noise=noise, into=into
        )
        into *= self.expected_lot / max(1, statistics.examples)
        return statistics


def test_mutation_dividing_by_the_drawn_lot_is_caught() -> None:
    wrong = mutated(DividesByTheDrawnLot)
    with pytest.raises(AssertionError):
        check_neighbours_share_noise(wrong)
    with pytest.raises(AssertionError):
        check_sensitivity(wrong)


@dataclass(frozen=True)
class LotFromTheSizeOfTheData(DpSgdMechanism):
    """The normaliser is q N with the private N."""

    def release(self, gradients, features, targets, *, lots, noise, into) -> LotStatistics:
        step = replace(FLAT, expected_lot=float(max(1, len(features))))
        return step.release(gradients, features, targets, lots=lots, noise=noise, into=into)


def test_mutation_a_normaliser_from_private_sizes_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_neighbours_share_noise(mutated(LotFromTheSizeOfTheData))


class NoNoiseForEmptyLots(DpSgdMechanism):
    def release(self, gradients, features, targets, *, lots, noise, into) -> LotStatistics:
        if len(features) == 0:
            into.zero_()
            return LotStatistics(0, 0, (0,))
        return super().release(gradients, features, targets, lots=lots, noise=noise, into=into)


def test_mutation_skipping_empty_lots_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_noise(mutated(NoNoiseForEmptyLots), examples=0)


def mutated(kind: type[DpSgdMechanism], **changes: object) -> DpSgdMechanism:
    fields = {name: getattr(FLAT, name) for name in FLAT.__dataclass_fields__}
    return kind(**{**fields, **changes})

"""Events are broken down into steps by rules that never under-report."""

import math

import numpy as np
import pytest

from fedsim.accountant import (
    ZCDP,
    Composed,
    EpochShuffled,
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    NonPrivate,
    PldAccountant,
    PoissonSampled,
    RandomAllocation,
    RepeatAndSelect,
    SelfComposed,
    UnsupportedEventError,
    zcdp_rho,
)
from fedsim.accountant.composition import (
    AllocatedGaussian,
    Approximate,
    Concentrated,
    FixedSizeGaussian,
    Mechanism,
    ReplacedGaussian,
    SampledGaussian,
    Selection,
    break_down,
    sort_steps,
)
from fedsim.accountant.rdp.poisson import rdp_sampled_gaussian


def noise_of(mechanism: Mechanism) -> float:
    assert isinstance(mechanism, (SampledGaussian, AllocatedGaussian))
    return mechanism.noise_multiplier


def test_counts_multiply_and_equal_steps_add_up() -> None:
    step = PoissonSampled(0.1, Gaussian(1.1))
    event = Composed((SelfComposed(SelfComposed(step, 3), 2), step, Gaussian(4.0)))
    assert break_down(event, 5).steps == {
        SampledGaussian(0.1, 1.1): 35,
        SampledGaussian(1.0, 4.0): 5,
    }


def test_gaussians_on_one_sample_are_one_gaussian() -> None:
    inner = Composed((Gaussian(1), SelfComposed(Gaussian(float(np.float32(2.0))), 4)))
    ((kind, count),) = break_down(PoissonSampled(0.1, inner)).steps.items()
    assert count == 1
    assert noise_of(kind) == pytest.approx((1.0 + 4 / 4.0) ** -0.5, rel=1e-15)


def test_eight_groups_cost_7_05_and_not_4_63() -> None:
    # The published figures for 8 groups at z_m = sqrt(8), q = 0.1, 100 steps, delta = 1e-5.
    noise = math.sqrt(8.0)
    joint = PoissonSampled(0.1, JointGaussian((noise,) * 8))
    apart = SelfComposed(PoissonSampled(0.1, Gaussian(noise)), 8)
    epsilons = [PldAccountant().compose(e, 100).get_epsilon(1e-5) for e in (joint, apart)]
    assert epsilons == pytest.approx([7.047, 4.628], abs=1e-3)


def test_a_joint_gaussian_is_one_gaussian_wherever_it_is_sampled() -> None:
    joint, one = JointGaussian((3.0, 4.0)), Gaussian(2.4)
    for sampled in (
        lambda e: e,
        lambda e: PoissonSampled(0.1, e),
        lambda e: RandomAllocation(10, e),
        lambda e: EpochShuffled(10, e),
    ):
        (ours,), (wanted,) = (break_down(sampled(event)).steps for event in (joint, one))
        assert type(ours) is type(wanted)
        assert noise_of(ours) == pytest.approx(noise_of(wanted), rel=1e-15)


@pytest.mark.parametrize(
    ("event", "zero_out", "replace_one"),
    [
        (Gaussian(2.0), SampledGaussian(1.0, 2.0), SampledGaussian(1.0, 1.0)),
        (JointGaussian((2.0,)), SampledGaussian(1.0, 2.0), SampledGaussian(1.0, 1.0)),
        (
            PoissonSampled(0.1, Gaussian(2.0)),
            SampledGaussian(0.1, 2.0),
            ReplacedGaussian(0.1, 2.0),
        ),
        (PoissonSampled(1.0, Gaussian(2.0)), SampledGaussian(1.0, 2.0), SampledGaussian(1.0, 1.0)),
        (FixedSizeSampled(100, 10, Gaussian(2.0)), None, FixedSizeGaussian(0.1, 2.0)),
        (FixedSizeSampled(10, 10, Gaussian(2.0)), None, SampledGaussian(1.0, 1.0)),
        (EpochShuffled(10, Gaussian(2.0)), SampledGaussian(1.0, 2.0), SampledGaussian(1.0, 1.0)),
        (
            RandomAllocation(10, Gaussian(2.0)),
            AllocatedGaussian(10, 2.0),
            SampledGaussian(1.0, 1.0),
        ),
        (ZCDP(0.5), Concentrated(0.5), Concentrated(0.5)),
        (EpsilonDelta(1.0, 1e-6), Approximate(1.0, 1e-6), Approximate(1.0, 1e-6)),
        (
            RepeatAndSelect(SelfComposed(Gaussian(2.0), 3), 10.0, None),
            Selection(((SampledGaussian(1.0, 2.0), 3),), 10.0, None),
            Selection(((SampledGaussian(1.0, 1.0), 3),), 10.0, None),
        ),
    ],
)
def test_what_each_event_is_under_each_adjacency(
    event: Event, zero_out: object, replace_one: object
) -> None:
    assert break_down(event, 2, "replace_one").steps == {replace_one: 2}
    if zero_out is None:
        with pytest.raises(UnsupportedEventError, match="use replace_one"):
            break_down(event, 2)
    else:
        assert break_down(event, 2).steps == {zero_out: 2}


def test_mechanisms_of_different_kinds_are_never_equal() -> None:
    kinds = [SampledGaussian(0.5, 2.0), ReplacedGaussian(0.5, 2.0), FixedSizeGaussian(0.5, 2.0)]
    assert len(set(kinds)) == 3
    steps = {**dict.fromkeys(kinds, 1), Approximate(0.5, 0.25): 1, Concentrated(0.5): 2}
    steps[Selection(((kinds[0], 1),), 2.0, None)] = 1
    assert sort_steps(steps) == sort_steps(dict(reversed(steps.items())))


def test_rho_adds_up_over_gaussians_and_is_the_slope_of_their_renyi_divergence() -> None:
    parts = [
        (SelfComposed(Gaussian(2.0), 3), 1),
        (JointGaussian((4.0, 4.0)), 2),
        (EpochShuffled(5, Gaussian(2.0)), 2),
        (ZCDP(0.25), 1),
    ]
    rho = zcdp_rho(parts)
    assert rho == pytest.approx(3 / 8 + 2 / 16 + 2 / 8 + 0.25)
    assert zcdp_rho(parts[:3], "replace_one") == pytest.approx(4 * (rho - 0.25))
    assert zcdp_rho([]) == 0.0
    for unknown in (PoissonSampled(0.1, Gaussian(1.0)), EpsilonDelta(1.0, 1e-9), Gaussian(0.0)):
        assert zcdp_rho([*parts, (unknown, 1)]) == math.inf
    # Why sampled releases have none: at a large order they cost as much as without sampling.
    slope = float(rdp_sampled_gaussian(1e-3, 1.0, (1e4,))[0]) / 1e4
    assert slope == pytest.approx(zcdp_rho([(Gaussian(1.0), 1)]), rel=0.01)


@pytest.mark.parametrize("sampled", [PoissonSampled(0.5, Gaussian(1.0)), ZCDP(1.0)])
def test_only_gaussians_can_be_sampled(sampled: Event) -> None:
    for event in (
        PoissonSampled(0.5, sampled),
        FixedSizeSampled(8, 2, sampled),
        EpochShuffled(4, sampled),
        RandomAllocation(4, sampled),
    ):
        with pytest.raises(UnsupportedEventError, match=r"no accounting rule for .* inside"):
            break_down(event, 1, "replace_one")


def test_a_single_gaussian_inside_keeps_its_noise_multiplier_exactly() -> None:
    for noise in np.linspace(0.3, 7.0, 50):
        ((kind, _),) = break_down(PoissonSampled(0.1, Gaussian(noise))).steps.items()
        assert noise_of(kind) == noise


@pytest.mark.parametrize(
    ("event", "non_private"),
    [
        (NonPrivate(), True),
        (Gaussian(0.0), True),
        (PoissonSampled(0.1, Gaussian(0.0)), True),
        (PoissonSampled(0.1, Composed((Gaussian(1.0), NonPrivate()))), True),
        (SelfComposed(NonPrivate(), 0), False),
        (PoissonSampled(0.0, Gaussian(0.0)), False),
        (PoissonSampled(0.0, NonPrivate()), False),
        (PoissonSampled(0.5, SelfComposed(NonPrivate(), 0)), False),
        (Composed(()), False),
        (JointGaussian((1.0, 0.0)), True),
        (EpochShuffled(3, Gaussian(0.0)), True),
        (RandomAllocation(3, Gaussian(0.0)), True),
        (RandomAllocation(3, Composed(())), False),
        (EpochShuffled(3, Composed(())), False),
        (EpsilonDelta(0.0, 0.0), False),
        (EpsilonDelta(0.0, 1.0), True),
        (ZCDP(0.0), False),
        (RepeatAndSelect(NonPrivate(), 2.0, 1.0), True),
        (RepeatAndSelect(Composed(()), 2.0, 1.0), False),
    ],
)
def test_what_counts_as_non_private(event: Event, non_private: bool) -> None:
    breakdown = break_down(event)
    assert breakdown.non_private is non_private
    assert not break_down(event, 0).non_private
    assert non_private or not breakdown.steps


def test_unsupported_parts_are_named() -> None:
    nested = PoissonSampled(0.5, PoissonSampled(0.25, Gaussian(1.0)))
    with pytest.raises(UnsupportedEventError, match=r"sampling_rate=0\.25.*inside.*0\.5"):
        break_down(Composed((Gaussian(1.0), nested)))
    with pytest.raises(UnsupportedEventError, match="no accounting rule for Event"):
        break_down(SelfComposed(Event(), 0))

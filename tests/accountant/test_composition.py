"""Events are broken down into steps by rules that never under-report."""

import math

import numpy as np
import pytest

from fedsim.accountant import (
    Composed,
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    RdpAccountant,
    SelfComposed,
    UnsupportedEventError,
)
from fedsim.accountant.composition import SampledGaussian, break_down


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
    assert kind.noise_multiplier == pytest.approx((1.0 + 4 / 4.0) ** -0.5, rel=1e-15)


def test_sampling_them_separately_would_under_report() -> None:
    noise, groups, rate = math.sqrt(8.0), 8, 0.1
    joint = PoissonSampled(rate, SelfComposed(Gaussian(noise), groups))
    apart = SelfComposed(PoissonSampled(rate, Gaussian(noise)), groups)
    epsilons = [RdpAccountant().compose(e, 100).get_epsilon(1e-5) for e in (joint, apart)]
    single = RdpAccountant().compose(PoissonSampled(rate, Gaussian(1.0)), 100).get_epsilon(1e-5)
    assert epsilons[0] == pytest.approx(single, rel=1e-12)
    assert epsilons[1] < 0.8 * epsilons[0]


def test_a_single_gaussian_inside_keeps_its_noise_multiplier_exactly() -> None:
    for noise in np.linspace(0.3, 7.0, 50):
        ((kind, _),) = break_down(PoissonSampled(0.1, Gaussian(noise))).steps.items()
        assert kind.noise_multiplier == noise


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

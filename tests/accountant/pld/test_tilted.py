"""Compositions at tiny delta: above the exact values, and close to them."""

import math
from types import ModuleType

import pytest

from fedsim.accountant import (
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    PldAccountant,
    PoissonSampled,
    RandomAllocation,
    RdpAccountant,
)
from fedsim.accountant.composition import Approximate, SampledGaussian
from fedsim.accountant.events import Adjacency
from fedsim.accountant.pld.fourier import tilted_profile
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon, gaussian_log_delta

TINY = (1e-10, 1e-12, 1e-15)


@pytest.mark.parametrize("delta", TINY)
@pytest.mark.parametrize(("q", "z", "steps"), [(0.01, 1.0, 1000), (0.1, 2.0, 300), (0.3, 5.0, 50)])
def test_epsilon_at_a_tiny_delta_is_that_of_the_inverted_transform(
    q: float, z: float, steps: int, delta: float, saddle_point: ModuleType
) -> None:
    exact = saddle_point.near_exact_epsilon({SampledGaussian(q, z): steps}, delta)
    epsilon = PldAccountant().compose(PoissonSampled(q, Gaussian(z)), steps).get_epsilon(delta)
    assert exact <= epsilon <= exact + 2e-4


@pytest.mark.parametrize("delta", TINY)
@pytest.mark.parametrize("tilt", [3.0, 8.0, 16.0])
def test_every_tilt_gives_a_bound_for_gaussians_in_closed_form(delta: float, tilt: float) -> None:
    """100 releases at z = 10 are one at z = 1; the best tilt is about 8."""
    exact = gaussian_epsilon(1.0, delta)
    profile = tilted_profile([(SampledGaussian(1.0, 10.0), 100)], 2.0**-10, tilt, exact - 0.1)
    assert profile is not None
    assert exact <= profile.epsilon(delta) <= exact + (2e-4 if tilt == 8.0 else math.inf)
    log_delta = gaussian_log_delta(1.0, exact)
    assert math.log(profile.delta(exact)) >= log_delta


def test_epsilon_rises_as_delta_falls_and_delta_undoes_it() -> None:
    ours = PldAccountant().compose(PoissonSampled(0.01, Gaussian(1.0)), 1000)
    deltas = [10.0 ** (-k / 2) for k in range(10, 33)]
    epsilons = [ours.get_epsilon(delta) for delta in deltas]
    assert epsilons == sorted(epsilons)
    for delta, epsilon in zip(deltas, epsilons, strict=True):
        assert delta * (1 - 1e-6) <= ours.get_delta(epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (RandomAllocation(94, Gaussian(1.0)), "zero_out"),
        (FixedSizeSampled(1000, 10, Gaussian(2.0)), "replace_one"),
    ],
)
def test_mechanisms_with_other_dominating_pairs_are_tilted_too(
    event: Event, adjacency: Adjacency
) -> None:
    ours = PldAccountant(adjacency=adjacency).compose(event, 10)
    bound = RdpAccountant(adjacency=adjacency).compose(event, 10)
    assert ours.get_epsilon(1e-14) < 0.98 * bound.get_epsilon(1e-14)


def test_a_delta_that_is_spent_outright_is_never_tilted_away() -> None:
    ours = PldAccountant().compose(PoissonSampled(0.1, Gaussian(2.0)), 100)
    ours.compose(EpsilonDelta(0.1, 1e-13))
    assert ours.get_epsilon(0.9e-13) == math.inf
    assert ours.get_delta(30.0) >= 1e-13


def test_the_mass_at_infinity_is_in_every_delta() -> None:
    """Tilting multiplies a loss by e^(s l), so it leaves out the losses at infinity."""
    steps = [(SampledGaussian(1.0, 10.0), 100), (Approximate(0.1, 1e-13), 2)]
    profile = tilted_profile(steps, 2.0**-10, 3.0, 5.0)
    assert profile is not None
    assert 2e-13 * (1 - 1e-3) <= profile.delta(50.0) <= 2e-13 * (1 + 1e-3)

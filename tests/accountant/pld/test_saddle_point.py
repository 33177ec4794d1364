"""The inversion of the Laplace transform against closed forms, and its refusals."""

import math
from types import ModuleType

import pytest

from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.pld.privacy_profile import gaussian_epsilon

Steps = dict[SampledGaussian, int]


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_plain_gaussians_have_a_closed_form(delta: float, saddle_point: ModuleType) -> None:
    steps: Steps = {SampledGaussian(1.0, 3.0): 4, SampledGaussian(1.0, 1.5): 2}
    mu = math.sqrt(4 / 9 + 2 / 2.25)
    assert saddle_point.near_exact_epsilon(steps, delta) == pytest.approx(
        gaussian_epsilon(mu, delta), rel=1e-9
    )


def test_one_sampled_step_has_a_closed_form(saddle_point: ModuleType) -> None:
    # (1-q) N(0) + q N(1) against N(0): the larger beyond x, where the loss is epsilon.
    q, z, epsilon = 0.9, 1.0, 0.3
    x = 0.5 + z * z * math.log((math.expm1(epsilon) + q) / q)

    def above(threshold: float) -> float:
        return 0.5 * math.erfc(threshold / z / math.sqrt(2.0))

    delta = q * above(x - 1.0) + (1.0 - q - math.exp(epsilon)) * above(x)
    steps: Steps = {SampledGaussian(q, z): 1}
    assert saddle_point.near_exact_epsilon(steps, delta) == pytest.approx(epsilon, rel=1e-9)


def test_published_value(saddle_point: ModuleType) -> None:
    # q = 0.01, z = 1, 10^4 steps, delta = 1e-5: 6.1877, from mpmath's inversion at 30 digits.
    epsilon = saddle_point.near_exact_epsilon({SampledGaussian(0.01, 1.0): 10_000}, 1e-5)
    assert epsilon == pytest.approx(6.1877, abs=5e-5)


def test_a_delta_above_the_total_variation_needs_no_epsilon(saddle_point: ModuleType) -> None:
    assert saddle_point.near_exact_epsilon({SampledGaussian(0.1, 4.0): 10}, 0.5) == 0.0


@pytest.mark.parametrize(
    "steps",
    [
        {SampledGaussian(0.001, 1.0): 100},  # the terms cancel
        {SampledGaussian(0.0145, 1.955): 3},  # the transform does not die out
        {SampledGaussian(0.5, 1e-200): 1},  # nothing finite
    ],
)
def test_what_it_cannot_do_is_refused(
    steps: Steps, saddle_point: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saddle_point, "_BUDGET", 1 << 19)
    with pytest.raises(saddle_point.InversionError):
        saddle_point.near_exact_epsilon(steps, 1e-5)

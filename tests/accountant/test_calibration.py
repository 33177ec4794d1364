"""Calibration never overshoots, and does not waste."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import Gaussian, PoissonSampled, calibrate_noise_multiplier, make_accountant


def spent(noise: float, rate: float, steps: int, delta: float, name: Any) -> float:
    event = PoissonSampled(rate, Gaussian(noise))
    return make_accountant(name).compose(event, steps).get_epsilon(delta)


@given(
    target=st.floats(0.2, 20.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-6]),
    rate=st.floats(0.002, 1.0),
    steps=st.integers(1, 1000),
    name=st.sampled_from(["pld", "rdp"]),
)
@settings(max_examples=25, deadline=None)
def test_guarantee_epsilon_is_at_most_the_target_and_within_the_tolerance(
    target: float, delta: float, rate: float, steps: int, name: Any
) -> None:
    if 1 - (1 - rate) ** steps < 20 * delta:
        return  # hardly anyone is ever sampled: no noise is needed
    noise = calibrate_noise_multiplier(
        target_epsilon=target, delta=delta, sampling_rate=rate, steps=steps, accountant=name
    )
    epsilon = spent(noise, rate, steps, delta, name)
    assert target - 1e-4 <= epsilon <= target


def test_pld_needs_less_noise_than_rdp() -> None:
    settings_ = {"target_epsilon": 8.0, "delta": 1e-5, "sampling_rate": 0.2, "steps": 200}
    pld = calibrate_noise_multiplier(**settings_, accountant="pld")
    rdp = calibrate_noise_multiplier(**settings_, accountant="rdp")
    assert pld == pytest.approx(1.8847, abs=1e-3)
    assert pld < rdp < 1.1 * pld
    assert calibrate_noise_multiplier(**settings_) == pld


def test_without_sampling_it_is_the_analytic_gaussian() -> None:
    # Balle and Wang 2018: epsilon 1, delta 1e-5 needs z = 3.7303; four steps need twice that.
    noise = calibrate_noise_multiplier(target_epsilon=1.0, delta=1e-5, sampling_rate=1, steps=1)
    assert noise == pytest.approx(3.7303, abs=1e-3)
    four = calibrate_noise_multiplier(target_epsilon=1.0, delta=1e-5, sampling_rate=1, steps=4)
    assert four == pytest.approx(2 * noise, rel=1e-3)


def test_small_targets_are_met_to_one_percent() -> None:
    noise = calibrate_noise_multiplier(target_epsilon=1e-3, delta=1e-5, sampling_rate=0.1, steps=10)
    assert 0.99e-3 <= spent(noise, 0.1, 10, 1e-5, "pld") <= 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be finite and > 0, got 0.0"),
        ({"target_epsilon": math.inf}, "target_epsilon must be"),
        ({"target_epsilon": math.nan}, "target_epsilon must be"),
        ({"delta": 0.0}, "delta must lie strictly between 0 and 1, got 0.0"),
        ({"sampling_rate": 1.5}, "sampling_rate must be between 0 and 1"),
        ({"sampling_rate": 0.0}, "sampling_rate and steps must be > 0"),
        ({"steps": 0}, "sampling_rate and steps must be > 0"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"tolerance": 0.0}, "tolerance must be"),
        ({"accountant": "gdp"}, "accountant must be one of"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "target_epsilon": 1.0,
        "delta": 1e-5,
        "sampling_rate": 0.1,
        "steps": 10,
    }
    with pytest.raises(ValueError, match=message):
        calibrate_noise_multiplier(**arguments | change)


def test_the_impossible_is_said_clearly() -> None:
    with pytest.raises(ValueError, match="cannot be met: even noise_multiplier"):
        calibrate_noise_multiplier(target_epsilon=1e-9, delta=1e-12, sampling_rate=1.0, steps=10**9)
    # An example is sampled with probability 0.01 in all, so delta 0.02 covers even its exposure.
    with pytest.raises(ValueError, match=r"delta must be below 0\.01, .* got 0\.02"):
        calibrate_noise_multiplier(target_epsilon=8.0, delta=0.02, sampling_rate=0.01, steps=1)
    with pytest.raises(ValueError, match="needs no noise to speak of"):
        calibrate_noise_multiplier(target_epsilon=1e6, delta=1e-5, sampling_rate=1.0, steps=1)

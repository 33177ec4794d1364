"""Calibration never overshoots, and does not waste."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import Gaussian, PoissonSampled, calibrate_noise_multiplier, make_accountant
from fedsim.accountant.calibration import calibrate_sampling_rate, calibrate_steps

NAMES = st.sampled_from(["pld", "rdp", "moments"])


def spent(
    noise: float, rate: float, steps: int, delta: float, name: Any, adjacency: Any = "zero_out"
) -> float:
    event = PoissonSampled(rate, Gaussian(noise))
    return make_accountant(name, adjacency=adjacency).compose(event, steps).get_epsilon(delta)


@given(
    target=st.floats(0.2, 20.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-6]),
    rate=st.floats(0.002, 1.0),
    steps=st.integers(1, 1000),
    name=NAMES,
)
@settings(max_examples=10, deadline=None)
def test_guarantee_epsilon_is_at_most_the_target_and_within_the_tolerance(
    target: float, delta: float, rate: float, steps: int, name: Any
) -> None:
    if 1 - (1 - rate) ** steps < 20 * delta:
        return  # hardly anyone is ever sampled: no noise is needed
    if name == "moments" and target < 0.5:
        return  # order 32 alone costs log(1/delta) / 31, whatever the noise
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
    with pytest.raises(ValueError, match="needs almost no noise"):
        calibrate_noise_multiplier(target_epsilon=1e6, delta=1e-5, sampling_rate=1.0, steps=1)


@given(
    target=st.floats(0.2, 20.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-6]),
    rate=st.floats(0.002, 1.0),
    noise=st.floats(0.6, 10.0),
    name=NAMES,
)
@settings(max_examples=10, deadline=None)
def test_guarantee_one_more_step_would_exceed_the_target(
    target: float, delta: float, rate: float, noise: float, name: Any
) -> None:
    arguments: Any = {"target_epsilon": target, "delta": delta, "sampling_rate": rate}
    try:
        steps = calibrate_steps(**arguments, noise_multiplier=noise, accountant=name)
    except ValueError:
        assert spent(noise, rate, 1, delta, name) > target
        return
    assert spent(noise, rate, steps, delta, name) <= target
    assert spent(noise, rate, steps + 1, delta, name) > target


@given(
    target=st.floats(0.5, 20.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-6]),
    noise=st.floats(0.6, 10.0),
    steps=st.integers(1, 1000),
    name=NAMES,
)
@settings(max_examples=10, deadline=None)
def test_guarantee_the_rate_spends_at_most_the_target_and_nearly_that(
    target: float, delta: float, noise: float, steps: int, name: Any
) -> None:
    arguments: Any = {"target_epsilon": target, "delta": delta, "noise_multiplier": noise}
    try:
        rate = calibrate_sampling_rate(**arguments, steps=steps, accountant=name)
    except ValueError:
        assert name == "moments"  # whose epsilon does not tend to 0 with the rate
        return
    epsilon = spent(noise, rate, steps, delta, name)
    assert epsilon <= target
    if epsilon < target - 1e-4 and rate < 1.0:
        # By Rényi DP epsilon jumps to 0 where delta covers the whole total variation.
        assert spent(noise, rate * (1 + 1e-9), steps, delta, name) > target


def test_the_three_calibrations_undo_each_other() -> None:
    common: Any = {"target_epsilon": 3.0, "delta": 1e-5}
    noise = calibrate_noise_multiplier(**common, sampling_rate=0.05, steps=500)
    assert calibrate_steps(**common, sampling_rate=0.05, noise_multiplier=noise) in (500, 501)
    rate = calibrate_sampling_rate(**common, noise_multiplier=noise, steps=500)
    assert rate == pytest.approx(0.05, rel=1e-3)


def test_known_numbers() -> None:
    # Exact: epsilon 6.18771 after 10^4 steps (see test_saddle_point.py).
    common: Any = {"delta": 1e-5, "noise_multiplier": 1.0}
    assert calibrate_steps(**common, target_epsilon=6.1878, sampling_rate=0.01) == 10_000
    # Rényi DP reaches 6.717 there: fewer steps fit.
    rdp = calibrate_steps(**common, target_epsilon=6.1878, sampling_rate=0.01, accountant="rdp")
    assert 8500 < rdp < 8700


def test_replacing_an_example_costs_more() -> None:
    common: Any = {"target_epsilon": 3.0, "delta": 1e-5, "adjacency": "replace_one"}
    noise = calibrate_noise_multiplier(**common, sampling_rate=0.05, steps=100, accountant="rdp")
    assert spent(noise, 0.05, 100, 1e-5, "rdp", "replace_one") == pytest.approx(3.0, abs=1e-4)
    steps = calibrate_steps(**common, sampling_rate=0.05, noise_multiplier=2.0, accountant="rdp")
    assert spent(2.0, 0.05, steps, 1e-5, "rdp", "replace_one") <= 3.0
    assert steps < calibrate_steps(
        target_epsilon=3.0, delta=1e-5, sampling_rate=0.05, noise_multiplier=2.0, accountant="rdp"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be"),
        ({"delta": 1.0}, "delta must"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be finite and > 0"),
        ({"accountant": "gdp"}, "accountant must be one of"),
        ({"adjacency": "neighbour"}, "adjacency must be one of"),
    ],
)
def test_bad_arguments_of_the_other_calibrations_are_named(
    change: dict[str, Any], message: str
) -> None:
    common: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=message):
        calibrate_steps(**{**common, "sampling_rate": 0.1, **change})
    with pytest.raises(ValueError, match=message):
        calibrate_sampling_rate(**{**common, "steps": 10, **change})


def test_what_cannot_be_calibrated_is_said_clearly() -> None:
    common: Any = {"target_epsilon": 1.0, "delta": 1e-5}
    tiny = common | {"delta": 1e-14, "accountant": "rdp"}
    with pytest.raises(ValueError, match="cannot be met: a single step spends epsilon"):
        calibrate_steps(**common, sampling_rate=0.5, noise_multiplier=0.5)
    with pytest.raises(ValueError, match=r"any number of steps: even 1e\+12 stay below it"):
        calibrate_steps(**common, sampling_rate=1e-9, noise_multiplier=10.0, accountant="rdp")
    with pytest.raises(ValueError, match="sampling_rate must be > 0"):
        calibrate_steps(**common, sampling_rate=0.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"cannot be met: even sampling_rate=.* spends"):
        calibrate_sampling_rate(**tiny, noise_multiplier=0.1, steps=10**6)
    with pytest.raises(ValueError, match="steps must be a whole number >= 1"):
        calibrate_sampling_rate(**common, noise_multiplier=1.0, steps=0)
    assert calibrate_sampling_rate(**common, noise_multiplier=50.0, steps=1) == 1.0

"""Group rules: clips, joint noise, least energy, and the split with quantile counts."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedsim.accountant.groups import (
    adaptive_clip_noise_multiplier,
    adaptive_clip_total_noise_multiplier,
    dimension_clip_norms,
    equal_clip_norms,
    explicit_clip_norms,
    group_noise_multiplier,
    least_energy_noise,
)

sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=30)
noises = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


@given(dimensions=sizes, clip=st.floats(1e-6, 1e6))
@settings(max_examples=30, deadline=None)
def test_every_rule_spends_exactly_the_whole_clip(dimensions: list[int], clip: float) -> None:
    for clips in (equal_clip_norms(clip, len(dimensions)), dimension_clip_norms(clip, dimensions)):
        assert np.linalg.norm(clips) == pytest.approx(clip, rel=1e-12)
    per_coordinate = dimension_clip_norms(clip, dimensions) / np.sqrt(dimensions)
    assert per_coordinate == pytest.approx(clip / math.sqrt(sum(dimensions)), rel=1e-12)


def test_the_harmonic_mean_rule_is_refused() -> None:
    """C_m = C / sqrt(d_m / D), D the harmonic mean: sum of C_m^2 = M C^2, a privacy error."""
    d = np.array([10.0, 1000.0, 100.0])
    harmonic = 3 / np.sum(1 / d)
    clips = 1.0 / np.sqrt(d / harmonic)
    assert np.sum(clips**2) == pytest.approx(3.0)
    assert clips[1] < clips[0]  # and the larger layer gets the smaller clip
    with pytest.raises(
        ValueError, match=r"sum of squares <= clip_norm\^2 = 1, got 3; divide .* 1\.73"
    ):
        explicit_clip_norms(1.0, clips.tolist())


def test_explicit_clips_may_leave_some_of_the_budget() -> None:
    assert explicit_clip_norms(5.0, [3.0, 4.0]).tolist() == [3.0, 4.0]
    assert explicit_clip_norms(5.0, [3.0, 3.0]).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="sum of squares"):
        explicit_clip_norms(5.0, [3.0, 4.00001])


@given(values=noises, scale=st.floats(1e-150, 1e150))
@settings(max_examples=30, deadline=None)
def test_joint_noise_is_below_each_and_scales(values: list[float], scale: float) -> None:
    joint = group_noise_multiplier(values)
    assert joint <= min(values)
    assert joint == pytest.approx(float(np.sum(np.array(values) ** -2.0)) ** -0.5, rel=1e-12)
    scaled = group_noise_multiplier([scale * value for value in values])
    assert scaled == pytest.approx(scale * joint, rel=1e-12)


def test_joint_noise_is_not_the_power_mean_and_has_no_batch_size() -> None:
    assert group_noise_multiplier([math.sqrt(8.0)] * 8) == pytest.approx(1.0)
    power_mean = float(np.mean(np.array([2.0, 3.0]) ** -2.0)) ** -0.5
    assert power_mean / group_noise_multiplier([2.0, 3.0]) == pytest.approx(math.sqrt(2.0))
    assert group_noise_multiplier([1.0, 0.0]) == 0.0


@given(dimensions=sizes, z=st.floats(0.1, 10.0), clip=st.floats(0.01, 100.0))
@settings(max_examples=30, deadline=None)
def test_least_energy_noise_has_the_stated_total(
    dimensions: list[int], z: float, clip: float
) -> None:
    clips = equal_clip_norms(clip, len(dimensions))
    sigma = least_energy_noise(z, clips.tolist(), dimensions)
    assert group_noise_multiplier((sigma / clips).tolist()) == pytest.approx(z, rel=1e-12)
    energy = float(np.sum(np.array(dimensions) * sigma**2))
    assert energy == pytest.approx((z * float(clips @ np.sqrt(dimensions))) ** 2, rel=1e-12)
    uniform = (z * math.sqrt(len(dimensions)) * clips) ** 2  # one z_m for all groups
    assert energy <= float(np.sum(np.array(dimensions) * uniform)) * (1 + 1e-12)


def test_least_energy_noise_is_the_minimum() -> None:
    clips, dimensions, z = np.array([0.3, 0.8, 0.5]), np.array([10, 500, 60]), 1.3

    def energy(log_shares: np.ndarray) -> float:
        shares = np.exp(log_shares) / np.sum(np.exp(log_shares))  # of z^-2
        return float(np.sum(dimensions * (z * clips) ** 2 / shares))

    best = minimize(energy, np.zeros(3), method="BFGS", options={"gtol": 1e-10}).fun
    sigma = least_energy_noise(z, clips.tolist(), dimensions.tolist())
    assert float(np.sum(dimensions * sigma**2)) == pytest.approx(best, rel=1e-8)


@given(z=st.floats(1e-3, 100.0), groups=st.integers(0, 50), spare=st.floats(1.001, 1e3))
@settings(max_examples=30, deadline=None)
def test_the_split_and_its_inverse(z: float, groups: int, spare: float) -> None:
    sigma_b = spare * z * math.sqrt(max(groups, 1)) / 2
    raised = adaptive_clip_noise_multiplier(z, sigma_b, groups)
    assert raised >= z
    total = adaptive_clip_total_noise_multiplier(raised, sigma_b, groups)
    assert total == pytest.approx(z, rel=1e-9)
    joint = group_noise_multiplier([raised, *[2.0 * sigma_b] * groups])  # bits have sensitivity 1/2
    assert joint == pytest.approx(z, rel=1e-9)


def test_no_counts_cost_nothing_and_too_little_count_noise_is_refused() -> None:
    assert adaptive_clip_noise_multiplier(1.1, 5.0, 0) == 1.1
    assert adaptive_clip_noise_multiplier(1.0, 10.0) == pytest.approx((1 - 1 / 400) ** -0.5)
    with pytest.raises(
        ValueError, match=r"count_noise must be > .* = 0\.5, got 0\.5.*whole budget"
    ):
        adaptive_clip_noise_multiplier(1.0, 0.5)
    with pytest.raises(ValueError, match=r"count_noise must be > .* = 1\.5, got 1\.4"):
        adaptive_clip_noise_multiplier(1.0, 1.4, 9)


BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (equal_clip_norms, (0.0, 3), r"clip_norm must .* got 0\.0"),
    (equal_clip_norms, (1.0, 0), "num_groups must be >= 1, got 0"),
    (equal_clip_norms, (1.0, 2.5), r"num_groups must be a whole number .* got 2\.5"),
    (dimension_clip_norms, (1.0, []), r"dimensions must be .* got \[\]"),
    (dimension_clip_norms, (1.0, [3, 0]), r"dimensions must be .* got \[3, 0\]"),
    (explicit_clip_norms, (1.0, []), "clip_norms must hold at least one value"),
    (explicit_clip_norms, (1.0, [0.5, -0.5]), r"clip_norms must .* got -0\.5"),
    (explicit_clip_norms, (math.inf, [0.5]), "clip_norm must be finite and > 0, got inf"),
    (group_noise_multiplier, ([],), "noise_multipliers must have at least one"),
    (group_noise_multiplier, ([1.0, -1.0],), r"noise_multipliers\[1\] must .* got -1\.0"),
    (group_noise_multiplier, ([math.nan],), r"noise_multipliers\[0\] must be a number, got NaN"),
    (least_energy_noise, (1.0, [0.5], [3, 4]), "dimensions must have one value .* got 2"),
    (least_energy_noise, (0.0, [0.5], [3]), r"noise_multiplier must .* got 0\.0"),
    (adaptive_clip_noise_multiplier, (0.0, 1.0), r"noise_multiplier must .* got 0\.0"),
    (adaptive_clip_noise_multiplier, (1.0, 1.0, -1), "num_groups must .* got -1"),
    (adaptive_clip_total_noise_multiplier, (1.0, 0.0), r"count_noise must .* got 0\.0"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)

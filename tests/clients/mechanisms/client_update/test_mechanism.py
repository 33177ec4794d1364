"""The release of a whole update: its sensitivity on the grid, its event and its noise."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.accountant import Gaussian, JointGaussian, PoissonSampled
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.client_update import UpdateMechanism, clipped_updates
from fedsim.clients.mechanisms.contract import ReleasedUpdates
from fedsim.noise.release import NoiseRangeError
from fedsim.noise.sources import DEVIATION, NoiseSource, NoNoise, SeededNoise

SIZE = 40
release_updates = UpdateMechanism.release_updates


def parameters(size: int, dtype: torch.dtype) -> FlatParameters:
    """Return parameters of so many values."""
    return FlatParameters(nn.Linear(size, 1, bias=False, dtype=dtype))


def effective(mechanism: UpdateMechanism) -> Fraction:
    (update, *_) = parts_of(mechanism)
    return Fraction(update)


def parts_of(mechanism: UpdateMechanism) -> tuple[float, ...]:
    event = mechanism.mechanism
    if isinstance(event, Gaussian):
        return (event.noise_multiplier,)
    assert isinstance(event, JointGaussian)
    return tuple(event.noise_multipliers)


def integers(update: Tensor, mechanism: UpdateMechanism) -> list[int]:
    start = torch.zeros(len(update), dtype=torch.float64)
    (steps,) = released(update, start, mechanism, NoNoise()).steps
    assert steps.dtype == torch.float64
    whole = [int(one) for one in steps.tolist()]
    assert whole == steps.tolist()
    return whole


def released(
    trained: Tensor,
    start: Tensor,
    mechanism: UpdateMechanism,
    noise: NoiseSource,
    *,
    has_data: bool = True,
) -> ReleasedUpdates:
    """Release of one client."""
    return release_updates(trained[None], start[None], [mechanism], [noise], [has_data])


values = st.lists(
    st.floats(-1e30, 1e30, allow_nan=False, allow_subnormal=True), min_size=SIZE, max_size=SIZE
)


@settings(max_examples=60, deadline=None)
@given(values, st.sampled_from([1e-8, 0.37, 1.0, 1e6]), st.sampled_from([0.05, 1.3, 40.0]))
def test_no_update_moves_the_integers_further_than_charged(
    update: list[float], bound: float, noise: float
) -> None:
    """Guarantee: zero-out moves the integers by at most 2²⁴ / z', computed exactly."""
    mechanism = UpdateMechanism(bound, noise).for_model(parameters(SIZE, torch.float64))
    moved = sum(n * n for n in integers(torch.tensor(update, dtype=torch.float64), mechanism))
    assert Fraction(moved) * effective(mechanism) ** 2 <= Fraction(2) ** 48


def test_the_bound_is_reached_but_for_rounding() -> None:
    mechanism = UpdateMechanism(0.5, 2.0).for_model(parameters(SIZE, torch.float64))
    far = integers(torch.full((SIZE,), 1e3, dtype=torch.float64), mechanism)
    norm = math.sqrt(sum(n * n for n in far))
    assert norm == pytest.approx(DEVIATION / 2.0, rel=1e-6)
    assert norm > 0.999 * DEVIATION / float(effective(mechanism))


def test_an_update_within_the_bound_is_left_whole() -> None:
    update = torch.tensor([0.3, -0.4], dtype=torch.float64)
    bounds = torch.tensor([0.5, 0.499], dtype=torch.float64)
    found, within = clipped_updates(update.expand(2, 2), bounds, bounds.new_full((2,), 0.5**10))
    assert within.tolist() == [True, False]
    torch.testing.assert_close(found[0], update * 2.0**10, rtol=0, atol=0)
    assert float(found[1].norm()) == pytest.approx(0.499 * 2.0**10)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_releases_noise_alone(wrong: float) -> None:
    mechanism = UpdateMechanism(1.0, 1.0, count_noise=2.0).for_model(parameters(3, torch.float32))
    trained, start = torch.tensor([0.1, wrong, 0.2]), torch.zeros(3)
    lost = released(trained, start, mechanism, NoNoise())
    assert lost.steps.tolist() == [[0.0, 0.0, 0.0]]
    assert lost.counts == pytest.approx([-0.5 * DEVIATION / 2.0])
    empty = released(start, start, mechanism, NoNoise(), has_data=False)
    assert empty.steps.tolist() == [[0.0, 0.0, 0.0]]
    assert empty.counts == [0.0]  # as zero-out says: a client without data adds nothing


def test_noise_has_the_charged_deviation_and_is_added_once() -> None:
    size, noise = 200_000, SeededNoise(bytes(range(32)))
    mechanism = UpdateMechanism(2.0, 1.5, count_noise=4.0).for_model(
        parameters(size, torch.float32)
    )
    start = torch.zeros(size)
    noisy = released(start, start, mechanism, noise)
    # False alarms: 1e-6, and the deviation of noise that is 3 % too small is found.
    assert float(noisy.steps.std()) == pytest.approx(DEVIATION, rel=0.01)
    assert mechanism.update_step * DEVIATION == pytest.approx(mechanism.value_noise * 2.0)
    assert mechanism.count_step * DEVIATION == pytest.approx(4.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=True, width=32), min_size=12, max_size=12))
def test_a_client_released_with_others_gets_the_integers_that_it_gets_alone(
    found: list[float],
) -> None:
    trained = torch.tensor(found, dtype=torch.float64).view(3, 4)
    starts = torch.ones(3, 4, dtype=torch.float64)
    mechanisms = [UpdateMechanism(bound, 1.5, count_noise=4.0) for bound in (0.1, 1.0, 1e6)]
    keys = [bytes([k]) * 32 for k in range(3)]
    noises = [SeededNoise(key) for key in keys]
    whole = release_updates(trained, starts, mechanisms, noises, [True, False, True])
    for k, has_data in enumerate((True, False, True)):
        noise = SeededNoise(keys[k])
        alone = released(trained[k], starts[k], mechanisms[k], noise, has_data=has_data)
        assert torch.equal(alone.steps[0], whole.steps[k])
        assert alone.counts == [whole.counts[k]]


def test_a_round_is_one_gaussian_and_the_bit_is_a_part_of_it() -> None:
    plain = UpdateMechanism(1.0, 1.5)
    assert plain.charges(0, 3) == [(Gaussian(1.5), 3)]
    assert plain.charges(5, 0) == []
    assert plain.charges(0, 3, noise_factor=2.0) == [(Gaussian(3.0), 3)]
    drawn = UpdateMechanism(1.0, 1.5, participation_rate=0.1)
    assert drawn.charges(0, 3) == [(PoissonSampled(0.1, Gaussian(1.5)), 3)]
    learnt = UpdateMechanism(1.0, 1.5, count_noise=3.0)
    parts = parts_of(learnt)
    assert parts[1] == 6.0
    assert group_noise_multiplier(parts) == pytest.approx(1.5)
    assert learnt.for_model(parameters(10_000, torch.float32)).effective_noise_multiplier < 1.5


def test_calibrated_noise_is_met_after_the_grid() -> None:
    for count in (None, 3.0):
        nominal = UpdateMechanism(1.0, 1.5, count_noise=count).for_model(
            parameters(10**6, torch.float32)
        )
        raised = nominal.with_effective_noise(1.5)
        assert raised.effective_noise_multiplier >= 1.5
        assert raised.noise_multiplier == pytest.approx(1.5, rel=1e-3)


def test_shares_of_noise_have_the_bit_and_the_update_on_one_grid() -> None:
    whole = UpdateMechanism(1.0, 1.5, count_noise=3.0)
    share = whole.with_share(whole.value_noise / 3.0, honest=9)
    assert share.value_noise == pytest.approx(whole.value_noise / 3.0)
    assert share.count_noise == pytest.approx(1.0)
    ((event, _),) = share.charges(0, 1, noise_factor=3.0)
    assert isinstance(event, JointGaussian)
    assert group_noise_multiplier(event.noise_multipliers) == pytest.approx(1.5)


def test_a_learnt_bound_changes_no_event() -> None:
    learnt = UpdateMechanism(1.0, 1.5, count_noise=3.0).for_model(parameters(7, torch.float32))
    assert learnt.resume(None) is learnt
    assert learnt.resume(0.01).mechanism == learnt.mechanism
    for wrong in (0.0, -1.0, math.inf, 1e30):
        with pytest.raises(ValueError, match="adaptive clip norm"):
            learnt.resume(wrong)
    with pytest.raises(ValueError, match="fixed"):
        UpdateMechanism(1.0, 1.5).resume(0.5)


def test_settings_without_a_guarantee_are_refused() -> None:
    with pytest.raises(ValueError, match="whole budget"):
        UpdateMechanism(1.0, 1.5, count_noise=0.7)
    with pytest.raises(ValueError, match="participation_rate"):
        UpdateMechanism(1.0, 1.5, participation_rate=0.0)
    with pytest.raises(NoiseRangeError, match="too small for the grid"):
        UpdateMechanism(1.0, 1e-9).for_model(parameters(3, torch.float64))
    with pytest.raises(NoiseRangeError, match="max_update_norm"):
        UpdateMechanism(1e-9, 1e-30).for_model(parameters(3, torch.float32))


def test_without_noise_the_event_says_so() -> None:
    silent = UpdateMechanism(1.0, 0.0, count_noise=3.0).for_model(parameters(4, torch.float32))
    assert silent.mechanism == Gaussian(0.0)
    clipped = released(torch.full((4,), 2.0), torch.zeros(4), silent, NoNoise())
    assert clipped.steps.tolist() == [pytest.approx([0.5] * 4)]

"""The search for noise stays at or below its target, and close to it."""

import pytest

from fedsim.accountant.search import NOISE_TOLERANCE, least_noise


@pytest.mark.parametrize("interpolate", [True, False])
@pytest.mark.parametrize("target", [0.03, 1.0, 40.0])
def test_least_noise_meets_the_target(target: float, interpolate: bool) -> None:
    noise = least_noise(lambda z: 2.0 / z, target, interpolate=interpolate)
    assert target - NOISE_TOLERANCE <= 2.0 / noise <= target


def test_least_noise_says_when_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"even noise_multiplier=.* raise target_epsilon"):
        least_noise(lambda z: 5.0, 1.0)
    with pytest.raises(ValueError, match=r"no noise to speak of.* lower target_epsilon"):
        least_noise(lambda z: 0.5, 1.0)

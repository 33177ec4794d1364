"""The search for noise stays at or below its target, and close to it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq

from fedsim.accountant.search import NOISE_TOLERANCE, least_noise, root_between


@pytest.mark.parametrize("interpolate", [True, False])
@pytest.mark.parametrize("target", [0.03, 1.0, 40.0])
def test_least_noise_meets_the_target(target: float, interpolate: bool) -> None:
    noise = least_noise(lambda z: 2.0 / z, target, interpolate=interpolate)
    assert target - NOISE_TOLERANCE <= 2.0 / noise <= target


def test_least_noise_says_when_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"even noise_multiplier=.* raise target_epsilon"):
        least_noise(lambda z: 5.0, 1.0)
    with pytest.raises(ValueError, match=r"almost no noise.* lower target_epsilon"):
        least_noise(lambda z: 0.5, 1.0)


@pytest.mark.parametrize("root", [-2.7, -1e-3, 0.0, 0.4, 3.0])
@pytest.mark.parametrize(
    "f", [math.expm1, math.atan, lambda x: x**3, lambda x: math.copysign(abs(x) ** 0.3, x)]
)
@pytest.mark.parametrize("relative", [2.0**-50, 1e-9])
def test_a_root_is_that_of_scipy_to_the_last_bit(
    f: Callable[[float], float], root: float, relative: float
) -> None:
    """The noise of recorded runs was calibrated with scipy's."""
    for low, high in ((root - 2.0, root + 0.7), (root + 0.3, root - 5.0), (root, root + 1.0)):
        expected, _ = brentq(
            lambda x: f(x - root),
            low,
            high,
            xtol=1e-300,
            rtol=np.float64(relative),
            full_output=True,
            disp=False,
        )
        found = root_between(lambda x: f(x - root), low, high, absolute=1e-300, relative=relative)
        assert found == expected

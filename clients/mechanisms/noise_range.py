"""Check that a floating-point dtype can represent noise and clipped gradients.

Privacy does not need this check: a release is made of integers, and its dtype is chosen afterwards.
But a model trained with noise that underflows to 0, or overflows, is useless.
"""

from collections.abc import Iterable
from statistics import NormalDist

import torch


class NoiseRangeError(ValueError):
    """Error: noise is so small or large that a floating-point dtype distorts its distribution."""


def check_deviations(
    deviations: Iterable[float], dtype: torch.dtype, name: str = "the standard deviation of noise"
) -> None:
    """Check that a dtype can represent noise of the given standard deviations, and sums of it.

    Guarantee: 2⁻²⁰ standard deviations are a normal number of the dtype, not a subnormal one, and
    the sum of 2²⁰ values of one standard deviation does not overflow. A deviation of 0 means no
    noise and passes.

    Args:
        deviations: standard deviations of noise, or other magnitudes that the tensor must hold.
        dtype: dtype of the tensor.
        name: name of the deviations, with which the error message starts.

    Raises:
        NoiseRangeError: a deviation is outside the range; the message names the deviation and the
            range.
    """
    info = torch.finfo(dtype)
    low, high = info.tiny * _HEADROOM, info.max / _HEADROOM
    for deviation in deviations:
        if not (low <= deviation <= high or deviation == 0.0):
            raise NoiseRangeError(
                f"{name} is {deviation:.3g}; {str(dtype).removeprefix('torch.')} keeps the "
                f"normal distribution from {low:.2g} to {high:.2g} only"
            )


def normal_tail(chance: float) -> float:
    """Return the number of standard deviations that |N(0, 1)| exceeds with a given probability.

    Args:
        chance: the probability, between 0 and 1.
    """
    return -NormalDist().inv_cdf(chance / 2.0)


_HEADROOM = 2.0**20

"""Sizes of noise and of clipped gradients that a floating-point type holds.

Privacy does not need this: a release is made of integers, and its type is chosen afterwards. A
model trained with noise that underflows to 0, or overflows, is of no use.
"""

from collections.abc import Iterable

import torch


class NoiseRangeError(ValueError):
    """A standard deviation at which a floating-point type does not keep the distribution."""


def check_deviations(
    deviations: Iterable[float], dtype: torch.dtype, what: str = "the standard deviation of noise"
) -> None:
    """Check that a type holds noise of these deviations, and what is added to it.

    Guarantee: a value down to 2⁻²⁰ deviations is a normal number with all its digits, and the sum
    of 2²⁰ values of one deviation does not overflow. 0 stands for no noise.

    Args:
        deviations: standard deviations, or other sizes of what is written.
        dtype: of the tensor that holds them.
        what: starts the message.

    Raises:
        NoiseRangeError: a deviation is outside the range; the message names both.
    """
    info = torch.finfo(dtype)
    low, high = info.tiny * _HEADROOM, info.max / _HEADROOM
    for deviation in deviations:
        if not (low <= deviation <= high or deviation == 0.0):
            raise NoiseRangeError(
                f"{what} is {deviation:.3g}; {str(dtype).removeprefix('torch.')} keeps the "
                f"normal distribution from {low:.2g} to {high:.2g} only"
            )


_HEADROOM = 2.0**20

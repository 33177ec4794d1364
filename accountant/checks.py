"""Checks of arguments: each returns the value in its plain Python type or raises ValueError.

`name` is the name of the argument in the message, `value` what the caller passed.
"""

import math
from typing import SupportsFloat


def real_number(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float; int, numpy and torch scalars all become the same number.

    Raises:
        ValueError: `value` is not a number, or is NaN.
    """
    if isinstance(value, (str, bytes, bool)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got NaN")
    return number


def non_negative(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float >= 0; raises ValueError if it is negative or infinite."""
    number = real_number(name, value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and >= 0, got {number!r}")
    return number + 0.0  # -0.0 would make an event unequal in JSON though equal in Python


def positive(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float > 0; raises ValueError if it is not, or is infinite."""
    number = real_number(name, value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {number!r}")
    return number


def at_least_one(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float >= 1; raises ValueError if it is smaller or infinite."""
    number = real_number(name, value)
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and >= 1, got {number!r}")
    return number


def probability(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float in [0, 1]; raises ValueError if it is outside."""
    number = real_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {number!r}")
    return number + 0.0


def open_probability(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float in (0, 1); raises ValueError if it is outside."""
    number = real_number(name, value)
    if not 0.0 < number < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {number!r}")
    return number


def whole_number(name: str, value: SupportsFloat) -> int:
    """Return `value` as an int >= 0; raises ValueError if it is negative or not whole."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value  # exact beyond 2**53, where a float would round
    else:
        real = real_number(name, value)
        if not math.isfinite(real) or real != math.floor(real):
            raise ValueError(f"{name} must be a whole number >= 0, got {real!r}")
        number = int(real)
    if number < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {number!r}")
    return number


def positive_whole_number(name: str, value: SupportsFloat) -> int:
    """Return `value` as an int >= 1; raises ValueError if it is smaller or not whole."""
    number = whole_number(name, value)
    if number == 0:
        raise ValueError(f"{name} must be a whole number >= 1, got 0")
    return number

"""Functions that check arguments, names of array types, and a cache of bounded size in bytes.

Every check takes the `name` of an argument, for the error message, and the argument's `value`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, SupportsFloat, TypeVar

import numpy as np
from numpy.typing import NDArray


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
    _require(0.0 <= number < math.inf, name, number, "be finite and >= 0")
    return number + 0.0  # -0.0 would make an event unequal in JSON though equal in Python


def positive(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float > 0; raises ValueError if it is not positive or is infinite."""
    number = real_number(name, value)
    _require(0.0 < number < math.inf, name, number, "be finite and > 0")
    return number


def at_least_one(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float >= 1; raises ValueError if it is smaller or infinite."""
    number = real_number(name, value)
    _require(1.0 <= number < math.inf, name, number, "be finite and >= 1")
    return number


def probability(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float in [0, 1]; raises ValueError if it is outside."""
    number = real_number(name, value)
    _require(0.0 <= number <= 1.0, name, number, "be between 0 and 1")
    return number + 0.0


def open_probability(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float in (0, 1); raises ValueError if it is outside."""
    number = real_number(name, value)
    _require(0.0 < number < 1.0, name, number, "lie strictly between 0 and 1")
    return number


def _require(holds: bool, name: str, number: float, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must {rule}, got {number!r}")


def whole_number(name: str, value: SupportsFloat) -> int:
    """Return `value` as an int >= 0; raises ValueError if it is negative or not whole."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value  # exact beyond 2**53, where a float would round
    else:
        real = real_number(name, value)
        _require(real.is_integer(), name, real, "be a whole number >= 0")
        number = int(real)
    _require(number >= 0, name, number, "be a whole number >= 0")
    return number


def positive_whole_number(name: str, value: SupportsFloat) -> int:
    """Return `value` as an int >= 1; raises ValueError if it is smaller or not whole."""
    number = whole_number(name, value)
    _require(number > 0, name, number, "be a whole number >= 1")
    return number


Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def cached_by_bytes(
    limit: int,
) -> Callable[[Callable[Arguments, Value]], Callable[Arguments, Value]]:
    """Return a decorator that keeps a function's most recently used results.

    The newest result is kept even if it exceeds the limit. Threads that call with equal arguments
    at the same time may each compute the result. Arguments must be positional and hashable. A
    result is None, has an attribute `nbytes`, or is a tuple of results.

    Args:
        limit: largest total size of the kept results, in bytes.
    """

    def decorate(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
        kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        lock, total = Lock(), 0

        @wraps(function)
        def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            nonlocal total
            if kwargs:
                raise TypeError("a cached function takes positional arguments only")
            with lock:
                if args in kept:
                    kept.move_to_end(args)
                    return kept[args][0]
            value = function(*args, **kwargs)
            with lock:
                if args not in kept:
                    kept[args] = value, _size(value)
                    total += kept[args][1]
                    while total > limit and len(kept) > 1:
                        total -= kept.popitem(last=False)[1][1]
            return value

        return cached

    return decorate


def _size(value: Any) -> int:
    """Return the size of a result in bytes."""
    if isinstance(value, tuple):
        return sum(map(_size, value))
    return 0 if value is None else value.nbytes

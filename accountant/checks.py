"""Functions that check arguments, names of array types, and a cache of bounded size in bytes.

Every check takes the `name` of an argument, for the error message, and the argument's `value`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from threading import Lock
from typing import Generic, ParamSpec, SupportsFloat, TypeVar

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
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and >= 0, got {number!r}")
    return number + 0.0  # -0.0 would make an event unequal in JSON though equal in Python


def positive(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float > 0; raises ValueError if it is not positive or is infinite."""
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


Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class CachedByBytes(Generic[Arguments, Value]):
    """A function with a cache of its most recently used results, at most `limit` bytes in total.

    The newest result is kept even if it exceeds the limit. Threads that call with equal arguments
    at the same time may each compute the result. Arguments must be positional and hashable.

    Args:
        function: the function whose results are kept.
        limit: largest total size of the kept results, in bytes.
        size_of: function that returns the size of one result, in bytes.
    """

    def __init__(
        self, function: Callable[Arguments, Value], limit: int, size_of: Callable[[Value], int]
    ) -> None:
        self._function, self._limit, self._size_of = function, limit, size_of
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()
        self.bytes_kept = 0
        update_wrapper(self, function)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        """Return the function's value at `args`, from the cache if it is kept there."""
        if kwargs:
            raise TypeError("a cached function takes positional arguments only")
        with self._lock:
            if args in self._kept:
                self._kept.move_to_end(args)
                return self._kept[args][0]
        value = self._function(*args, **kwargs)
        size = self._size_of(value)
        with self._lock:
            if args not in self._kept:
                self._kept[args] = value, size
                self.bytes_kept += size
                while self.bytes_kept > self._limit and len(self._kept) > 1:
                    self.bytes_kept -= self._kept.popitem(last=False)[1][1]
        return value


def cached_by_bytes(
    limit: int, size_of: Callable[[Value], int]
) -> Callable[[Callable[Arguments, Value]], CachedByBytes[Arguments, Value]]:
    """Return a decorator that gives a function a cache of bounded size, see `CachedByBytes`.

    Args:
        limit: largest total size of the kept results, in bytes.
        size_of: function that returns the size of one result, in bytes.
    """
    return lambda function: CachedByBytes(function, limit, size_of)

"""Array types of the accountant, and a cache of large values that is bounded by their bytes.

`functools.lru_cache` counts entries instead.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from threading import Lock
from typing import Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class CachedByBytes(Generic[Arguments, Value]):
    """A function that keeps its latest results while they have at most `limit` bytes together.

    The newest result is kept whatever its size. Threads that ask for the same thing at the same
    time may each compute it. Arguments must be positional and hashable.

    Args:
        function: what is computed.
        limit: in bytes.
        size_of: returns the bytes of a result.
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
        """Return the function's value at `args`, from the cache if it is there."""
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
    """Return a decorator that makes a function a `CachedByBytes`.

    Args:
        limit: largest total size of the kept results, in bytes.
        size_of: size of one result, in bytes.
    """
    return lambda function: CachedByBytes(function, limit, size_of)

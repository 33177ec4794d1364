"""Flower arrays without serialization, for messages that stay in the process.

Flower's `Array` holds the bytes of a .npy file. Within one process that costs two copies and a
parser for each array of each client. A `LiveArray` holds the numbers and makes the bytes on demand.
It is read-only, so that all code in the process can share it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord


class LiveArray(Array):
    """A read-only `Array` around numbers in memory.

    Pickling makes it an ordinary Flower array, as does a new record of the same arrays.

    Args:
        values: numbers of any shape; the caller must not change them afterwards.
    """

    stype = "numpy.ndarray"

    def __init__(self, values: np.ndarray) -> None:
        if values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        self.__dict__["_values"] = values

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  rarely needed
        """The name of the numbers' type."""
        return _name(self.numpy().dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shape of the array."""
        return self.numpy().shape

    @property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]  made on demand
        """The bytes of the array as a .npy file."""
        made = self.__dict__.get("_data")
        if made is None:
            made = self.__dict__["_data"] = Array(self.numpy()).data
        return made

    def numpy(self) -> np.ndarray:
        """Return the numbers, read-only and without a copy."""
        return self.__dict__["_values"]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "is_dirty":
            raise AttributeError(f"a live array is shared and cannot be changed: {name}")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        return Array, (self.dtype, self.shape, self.stype, self.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        ours, theirs = ((a.dtype, a.shape, a.stype, a.data) for a in (self, other))
        return ours == theirs

    __hash__ = None  # as Array's


@lru_cache
def _name(dtype: np.dtype[Any]) -> str:
    """Return a type's name; numpy's own conversion is slower than a copy of a small array."""
    return str(dtype)


def live_record(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of live arrays, in the given order; do not change `values` afterwards."""
    record = ArrayRecord()
    for name, value in values.items():  # Flower's constructor checks each array twice
        record[name] = LiveArray(value)
    return record


def is_live(record: ArrayRecord) -> bool:
    """Whether all arrays of a record are live."""
    return all(isinstance(array, LiveArray) for array in record.values())

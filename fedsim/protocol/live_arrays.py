"""Flower arrays that are not serialized: for messages that never leave the process.

Flower's `Array` holds the bytes of a .npy file. Within one process that is two copies and a parser
for each array of each client. A `LiveArray` holds the numbers themselves and makes the bytes only
when somebody asks. It cannot be changed, so that everybody in the process may share it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedsim.protocol.records import array_record


class LiveArray(Array):
    """An `Array` around numbers in memory; read-only.

    Pickled or sent over a wire it would be an ordinary array: `portable` makes it one.

    Args:
        values: taken over, and not to be changed by anybody from here on.
    """

    stype = "numpy.ndarray"

    def __init__(self, values: np.ndarray) -> None:
        if values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        self.__dict__["_values"] = values

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  few ask for it
        """The name of the numbers' type."""
        return _name(self.numpy().dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shape of the array."""
        return self.numpy().shape

    @property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]  made when asked
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
    """Return a type's name, which numpy takes longer to spell than to copy a small array."""
    return str(dtype)


def live_record(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of live arrays, in the given order; `values` are taken over."""
    return array_record({name: LiveArray(value) for name, value in values.items()})


def is_live(record: ArrayRecord) -> bool:
    """Tell whether a record can be shared as it is: all its arrays are live."""
    return all(isinstance(array, LiveArray) for array in record.values())


def portable(record: ArrayRecord) -> ArrayRecord:
    """Return the record as Flower's own, which can leave the process."""
    return ArrayRecord(dict(record.items()))

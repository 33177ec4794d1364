"""Models as Flower array records, which hold serialized or unserialized ("live") arrays.

Flower's `Array` holds the bytes of a .npy file. Within one process that costs two copies and a
parser for each array of each client. A `LiveArray` holds the numbers and makes the bytes on demand.
It is read-only, so that all code in the process can share it.

A global model in a message normally has the parameters by name, and an upload has the same names
and shapes. In zeroth-order training messages hold coefficients of public random directions instead
of parameters: a global model has those of all rounds so far, and an upload has those of one round.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)


def record_of(content: RecordDict, name: str, kind: type[_Record]) -> _Record | None:
    """Return the record with a given name and type; None if there is none.

    This is faster than Flower's own access. Flower's views copy all records of a type each time. If
    the name is missing, as it often is, Flower's `get` raises and catches an error.

    Args:
        content: the content of a message, or a client's state.
        name: the name of the record.
        kind: the type of the record.
    """
    if name not in content:
        return None
    record = content[name]
    return record if isinstance(record, kind) else None


def digest(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of the names, types, shapes and bytes of arrays, in the given order."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        header = json.dumps([name, array.dtype, list(array.shape), len(array.data)])
        state.update(header.encode())
        state.update(array.data)
    return state.hexdigest()


def to_numpy(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a Flower record as numpy arrays by name."""
    return {name: array.numpy() for name, array in arrays.items()}


def to_arrays(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a Flower record with the named arrays, in the given order."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


class LiveArray(Array):
    """A read-only Flower `Array` around a numpy array in memory, without serialization.

    A live array becomes an ordinary Flower array if it is pickled or copied into a new Flower
    record.

    Args:
        values: an array of any shape; the caller must not change it afterwards.
    """

    stype = "numpy.ndarray"

    def __init__(self, values: np.ndarray) -> None:
        if values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        self.__dict__["_values"] = values

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  rarely needed
        """Name of the array's dtype."""
        return _name(self.numpy().dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Shape of the array."""
        return self.numpy().shape

    @property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]  made on demand
        """Bytes of the array as a .npy file, made at the first access."""
        made = self.__dict__.get("_data")
        if made is None:
            made = self.__dict__["_data"] = Array(self.numpy()).data
        return made

    def numpy(self) -> np.ndarray:
        """Return the numpy array itself, read-only and without a copy."""
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
    """Return a dtype's name, cached as numpy's conversion is slower than a small array's copy."""
    return str(dtype)


def live_record(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a Flower record of unserialized arrays; the caller must not change `values` later."""
    record = ArrayRecord()
    for name, value in values.items():  # Flower's constructor checks each array twice
        record[name] = LiveArray(value)
    return record


def is_live(record: ArrayRecord) -> bool:
    """Whether all arrays of a Flower record are `LiveArray` objects."""
    return all([isinstance(array, LiveArray) for array in record.values()])


def read_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a message as numpy arrays by name.

    Raises:
        ValueError: another process sent bytes that are no array.
    """
    if is_live(record):
        return to_numpy(record)
    values: dict[str, np.ndarray] = {}
    for name, array in record.items():
        try:
            value = array.numpy()
        except Exception as error:  # numpy raises many classes for wrong bytes
            raise ValueError(f"array {name!r} cannot be read: {type(error).__name__}") from error
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
            raise ValueError(f"array {name!r} cannot be read: it is no array of numbers")
        values[name] = value
    return values


COEFFICIENTS = "coefficients"
"""Name of the array of zeroth-order coefficients, for K steps and P directions in a round.

Its shape is (rounds, K, P) in a global model and (K, P) in an upload.
"""

BASE_DIGEST = "base-sha256"
"""Name of the array, uint8 (32,), with the digest of model values that no message carries."""


def is_coefficients(arrays: ArrayRecord) -> bool:
    """Whether arrays are a model given by zeroth-order coefficients instead of parameters."""
    return set(arrays.keys()) == {COEFFICIENTS, BASE_DIGEST}


def upload_base(arrays: ArrayRecord) -> ArrayRecord:
    """Return the upload of a client that leaves the global model unchanged.

    The result is the global model itself, or coefficients of 0 if it is given by coefficients.

    Args:
        arrays: the global model of a train request, given by parameters or by coefficients.
    """
    if not is_coefficients(arrays):
        return arrays
    rounds = arrays[COEFFICIENTS].numpy()
    return to_arrays({COEFFICIENTS: np.zeros(rounds.shape[1:], rounds.dtype)})


def with_round(arrays: ArrayRecord, aggregate: ArrayRecord) -> ArrayRecord:
    """Return the global model after a round.

    Usually the result is the aggregate itself. In zeroth-order training a global model is the list
    of coefficients of all rounds so far; the coefficients of the round are then appended.

    Args:
        arrays: the global model before the round.
        aggregate: the aggregate of the round: a model, or in zeroth-order training the round's
            coefficients.
    """
    if not is_coefficients(arrays):
        return aggregate
    values = to_numpy(arrays)
    rows = [values[COEFFICIENTS], aggregate[COEFFICIENTS].numpy()[np.newaxis]]
    return to_arrays({**values, COEFFICIENTS: np.concatenate(rows)})


def without_update(arrays: ArrayRecord) -> ArrayRecord:
    """Return the global model after a round without an update.

    A model given by coefficients gets coefficients of 0 for the round.
    """
    return with_round(arrays, upload_base(arrays)) if is_coefficients(arrays) else arrays

"""Arrays of a model as Flower records, and their digest."""

import hashlib
import json

import numpy as np
from flwr.app import Array, ArrayRecord


def digest(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of the arrays' names, types, shapes and bytes, in their order."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        header = json.dumps([name, array.dtype, list(array.shape), len(array.data)])
        state.update(header.encode())
        state.update(array.data)
    return state.hexdigest()


def to_numpy(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays by name."""
    return {name: array.numpy() for name, array in arrays.items()}


def to_arrays(values: dict[str, np.ndarray]) -> ArrayRecord:
    """Return the record of named arrays, in the given order."""
    return ArrayRecord({name: Array(value) for name, value in values.items()})

"""Coefficients of public directions as the model of a request, and as an upload.

With zeroth-order steps the global model on the wire is the list of all rounds' coefficients, and an
upload is those of one round. Elsewhere an upload has the names and shapes of the model.
"""

import numpy as np
from flwr.app import ArrayRecord

from fedsim.protocol.arrays import to_arrays, to_numpy

COEFFICIENTS = "coefficients"
"""Name of the coefficients: (rounds, K, P) in a model, (K, P) in an upload."""

BASE_DIGEST = "base-sha256"
"""Name of the digest of the values that no message carries, uint8 (32,)."""


def is_coefficients(arrays: ArrayRecord) -> bool:
    """Whether a model is a list of coefficients."""
    return set(arrays.keys()) == {COEFFICIENTS, BASE_DIGEST}


def upload_base(arrays: ArrayRecord) -> ArrayRecord:
    """Return what an upload is compared with: the model, or coefficients of 0.

    Args:
        arrays: the model of a request.
    """
    if not is_coefficients(arrays):
        return arrays
    rounds = arrays[COEFFICIENTS].numpy()
    return to_arrays({COEFFICIENTS: np.zeros(rounds.shape[1:], rounds.dtype)})


def with_round(arrays: ArrayRecord, aggregate: ArrayRecord) -> ArrayRecord:
    """Return the model after a round.

    Args:
        arrays: the model before it.
        aggregate: the next model; where it is a list of coefficients, those of the round.
    """
    if not is_coefficients(arrays):
        return aggregate
    values = to_numpy(arrays)
    rows = [values[COEFFICIENTS], aggregate[COEFFICIENTS].numpy()[np.newaxis]]
    return to_arrays({**values, COEFFICIENTS: np.concatenate(rows)})


def without_update(arrays: ArrayRecord) -> ArrayRecord:
    """Return the model after a round that left it as it was: its coefficients are 0."""
    return with_round(arrays, upload_base(arrays)) if is_coefficients(arrays) else arrays

"""Averaging of iterates: the model of a federation as an average of its global models.

The clients go on from the last global model. Each round's model is post-processed at the server, so
no ε changes.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from fedsim.protocol.arrays import to_numpy


def next_average(
    average: Mapping[str, np.ndarray], arrays: ArrayRecord, *, round_number: int, decay: float
) -> dict[str, np.ndarray]:
    """Return the average of the models of all rounds, each older one weighing `decay` as much.

    The model of round i of t has the weight decay^(t − i) over the sum of these. The initial model
    has none.

    Args:
        average: the average before the round, float64 by name; empty before the first round.
        arrays: the global model after the round.
        round_number: t, from 1.
        decay: in (0, 1).
    """
    share = (1 - decay) / (1 - decay**round_number)
    found = {}
    for name, value in to_numpy(arrays).items():
        if np.issubdtype(value.dtype, np.floating):  # counters are those of the last round
            before = average.get(name, np.zeros(()))
            found[name] = before + share * (value - before)
    return found

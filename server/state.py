"""The state of a federation's server between two rounds; a checkpoint is this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from flwr.app import ArrayRecord

from fedsim.protocol.arrays import to_arrays, to_numpy


@dataclass(frozen=True)
class ServerState:
    """The server's state after `round_number` rounds.

    Random streams are keyed by round and privacy accounts live in the ledger, so a run that
    continues from this state ends as an uninterrupted one.

    Attributes:
        arrays: the global model, which the clients of the next round start from.
        round_number: rounds finished; 0 before the first.
        clip_norms: adapted clipping bound of each client with adaptive clipping. A function of
            releases that were charged, so the server may know it.
        withdrawn: clients that left because their privacy budget is spent.
        optimizer: arrays of the server's optimizer by name, such as moments; empty for FedAvg.
        average: average of the global models so far, float64 by name (`next_average`); empty
            without `federation.server_averaging`.
    """

    arrays: ArrayRecord
    round_number: int = 0
    clip_norms: Mapping[int, float] = field(default_factory=dict)
    withdrawn: frozenset[int] = frozenset()
    optimizer: Mapping[str, np.ndarray] = field(default_factory=dict)
    average: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def model(self) -> ArrayRecord:
        """The model that is evaluated and saved: the average, or else the last global model."""
        if not self.average:
            return self.arrays
        return to_arrays(
            {
                name: self.average.get(name, value).astype(value.dtype)
                for name, value in to_numpy(self.arrays).items()
            }
        )

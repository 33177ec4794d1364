"""The state of a federation's server between two rounds; a checkpoint is this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord


@dataclass(frozen=True)
class ServerState:
    """The server's state after `round_number` rounds.

    Random streams are keyed by round and privacy accounts live in the ledger, so a run that
    continues from this state ends as an uninterrupted one.

    Attributes:
        arrays: the global model.
        round_number: rounds finished; 0 before the first.
        clip_norms: adapted clipping bound of each client with adaptive clipping. A function of
            releases that were charged, so the server may know it.
        withdrawn: clients that left because their privacy budget is spent.
        optimizer: arrays of the server's optimizer by name, such as moments; empty for FedAvg.
    """

    arrays: ArrayRecord
    round_number: int = 0
    clip_norms: Mapping[int, float] = field(default_factory=dict)
    withdrawn: frozenset[int] = frozenset()
    optimizer: Mapping[str, np.ndarray] = field(default_factory=dict)

"""The state of a federation's server between two rounds; a checkpoint is this and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from flwr.app import ArrayRecord

from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.noisy_sums import LearntBound

Arrays = Mapping[str, np.ndarray]


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
        memory: the algorithm's arrays by name, such as moments; empty for FedAvg.
        client_memory: the algorithm's arrays of all clients by name, a row for each (N, ...).
        average: average of the global models so far, float64 by name (`next_average`); empty
            without `federation.server_averaging`.
        versions: older global models that clients still train from, by the round after which each
            was made; empty but in asynchronous rounds.
        best: best value so far of the metric of `federation.early_stopping`, and its round; None
            without one.
    """

    arrays: ArrayRecord
    round_number: int = 0
    clip_norms: Mapping[int, LearntBound] = field(default_factory=dict)
    withdrawn: frozenset[int] = frozenset()
    memory: Arrays = field(default_factory=dict)
    client_memory: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    versions: Mapping[int, ArrayRecord] = field(default_factory=dict)
    best: tuple[float, int] | None = None

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The global model's arrays by name."""
        return to_numpy(self.arrays)

    @cached_property
    def model(self) -> ArrayRecord:
        """The model that is evaluated and saved: the average, or else the last global model."""
        if not self.average:
            return self.arrays
        return to_arrays(
            {
                name: self.average.get(name, value).astype(value.dtype)
                for name, value in self.values.items()
            }
        )

    def with_model(self, values: Arrays) -> Self:
        """Return the state with another global model.

        Args:
            values: its arrays by name, in the order of the model, cast to their types.
        """
        cast = {
            name: np.asarray(values[name]).astype(value.dtype)
            for name, value in self.values.items()
        }
        return replace(self, arrays=to_arrays(cast))

    def with_memory(self, memory: Arrays, client_memory: Arrays | None = None) -> Self:
        """Return the state with other arrays of the algorithm.

        Args:
            memory: the server's, by name.
            client_memory: those of all clients (N, ...) by name; None: as they are.
        """
        rows = self.client_memory if client_memory is None else client_memory
        kept = {name: np.asarray(value) for name, value in sorted(memory.items())}
        return replace(self, memory=kept, client_memory=dict(sorted(rows.items())))

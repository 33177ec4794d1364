"""State of a federation's server between two rounds, which a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from flwr.app import ArrayRecord

from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.noisy_sums import AdaptiveClipNorm

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ServerState:
    """State of the server after `round_number` rounds.

    A run that continues from this state has the same results as an uninterrupted run. For this,
    random numbers depend on the seed and the round, and privacy charges are in the ledger.

    Attributes:
        arrays: the global model, from which the clients of the next round start.
        round_number: the number of finished rounds; 0 before the first round.
        clip_norms: the adaptive clip norm of each client that has one. It depends only on charged
            releases, so the server may know it.
        withdrawn: the clients that left because their privacy budget is spent.
        memory: the algorithm's arrays by name, such as moments; empty for FedAvg.
        client_memory: the algorithm's arrays for all clients by name, one row per client (N, ...).
        average: the moving average of the global models, float64 arrays by name; empty without
            `federation.ema_decay`.
        versions: the older global models from which clients still train, by the round that produced
            each; empty in synchronous rounds.
        best: the best value so far of the metric of `federation.early_stopping`, and its round;
            None without early stopping or before the first value.
    """

    arrays: ArrayRecord
    round_number: int = 0
    clip_norms: Mapping[int, AdaptiveClipNorm] = field(default_factory=dict)
    withdrawn: frozenset[int] = frozenset()
    memory: Arrays = field(default_factory=dict)
    client_memory: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    versions: Mapping[int, ArrayRecord] = field(default_factory=dict)
    best: tuple[float, int] | None = None

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Arrays of the global model by name."""
        return to_numpy(self.arrays)

    @cached_property
    def model(self) -> ArrayRecord:
        """Model to evaluate and save: the moving average if there is one, else the global model."""
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
            values: the arrays of the new model by name; they are cast to the dtypes of the old one.
        """
        cast = {
            name: np.asarray(values[name]).astype(value.dtype)
            for name, value in self.values.items()
        }
        return replace(self, arrays=to_arrays(cast))

    def with_memory(self, memory: Arrays, client_memory: Arrays | None = None) -> Self:
        """Return the state with new arrays of the algorithm.

        Args:
            memory: the arrays by name that replace `memory`.
            client_memory: the arrays (N, ...) by name that replace `client_memory`; None to keep
                the old ones.
        """
        rows = self.client_memory if client_memory is None else client_memory
        kept = {name: np.asarray(value) for name, value in sorted(memory.items())}
        return replace(self, memory=kept, client_memory=dict(sorted(rows.items())))

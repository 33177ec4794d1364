"""Updates of clients that started from an older global model (FedBuff, Nguyen et al. 2022).

The server keeps the older models that clients still train from. Every value that this module
computes depends only on earlier releases and public numbers, so it is post-processing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.messages import TrainReply
from fedsim.server.aggregation.aggregator import Aggregator, ClientAnswer
from fedsim.server.participation.buffered import BufferedRound, BufferedSchedule
from fedsim.server.round_parts import Aggregate, RoundPart
from fedsim.server.round_report import RoundReport


def staleness_scale(staleness: int) -> float:
    """Return (1 + s)^(-1/2), the scale of an update whose staleness is s rounds."""
    return float((1 + staleness) ** -0.5)


def version_of(state: ServerState, version: int) -> ArrayRecord:
    """Return the global model as it was after round `version`.

    Args:
        state: the server state before the current round.
        version: the number of the round; 0 for the initial model.

    Raises:
        KeyError: the state no longer holds this model.
    """
    return state.arrays if version == state.round_number else state.versions[version]


def kept_versions(state: ServerState, pending: frozenset[int]) -> dict[int, ArrayRecord]:
    """Return the older global models to keep after a round, by the round that produced them.

    Args:
        state: the server state before the round.
        pending: the rounds whose global models clients still train from after this round.
    """
    known = {**state.versions, state.round_number: state.arrays}
    return {version: known[version] for version in sorted(pending) if version in known}


def as_current(
    reply: TrainReply, start: ArrayRecord, state: ServerState, version: int
) -> TrainReply:
    """Return a stale reply, turned into an update of the current global model.

    Let x be the current model, y the trained model, and x_start the model from which the client
    started. With staleness s, the reply's new model is x + (1 + s)^(-1/2) (y - x_start).

    A reply whose arrays do not fit the model is returned unchanged; the aggregator refuses it.

    Args:
        reply: the client's reply, which holds y.
        start: the model x_start that the client started from, arrays by name.
        state: the server state before the round, which holds x.
        version: the round after which the client started, so s is the number of rounds since then.
    """
    staleness = state.round_number - version
    if not staleness:
        return reply
    trained, began, now = to_numpy(reply.arrays), to_numpy(start), state.values
    if not _same_layout(trained, now):
        return reply
    scale = staleness_scale(staleness)
    moved = {name: _moved(now[name], trained[name], began[name], scale) for name in now}
    return replace(reply, arrays=to_arrays(moved))


class StaleUpdates(RoundPart):
    """Part of an asynchronous round that handles clients that started from an older global model.

    Args:
        schedule: the public schedule of asynchronous rounds.
    """

    def __init__(self, schedule: BufferedSchedule) -> None:
        self._schedule = schedule
        self._state: ServerState
        self._round: BufferedRound

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Look up in the schedule which clients are in the round and when each one started."""
        self._state, self._round = state, self._schedule.round(state.round_number + 1)

    def start(self, client: int) -> ArrayRecord:
        """Return the global model that a client started from."""
        return version_of(self._state, self._round.start_of(client))

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Return a client's answer, turned into an update of the current global model."""
        if not isinstance(answer, TrainReply):
            return answer
        version = self._round.start_of(client)
        return as_current(answer, self.start(client), self._state, version)

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the older global models that clients still train from."""
        return replace(state, versions=kept_versions(self._state, self._round.pending))

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the report with the simulated time and each participant's staleness added."""
        now, round_ = self._state.round_number, self._round
        staleness = {client: now - round_.start_of(client) for client in aggregate.clients}
        clients = replace(report.clients, staleness=staleness)
        return replace(
            report, clients=clients, cost=replace(report.cost, simulated_time=round_.time)
        )


def _same_layout(arrays: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return list(arrays) == list(other) and all(
        value.shape == other[name].shape and value.dtype == other[name].dtype
        for name, value in arrays.items()
    )


def _moved(now: np.ndarray, trained: np.ndarray, began: np.ndarray, scale: float) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # the aggregator refuses such values
        moved = now + scale * np.subtract(trained, began, dtype=np.float64)
        whole = not np.issubdtype(now.dtype, np.floating)
        return np.asarray(np.rint(moved) if whole else moved).astype(now.dtype)

"""Updates that started from an older version of the global model (FedBuff, Nguyen et al. 2022).

The server keeps the versions that clients still train from. Every value here is a function of
earlier releases and public numbers, so it is post-processing.
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
    """Return (1 + s)^(-1/2), the scale of an update that is s rounds old."""
    return float((1 + staleness) ** -0.5)


def version_of(state: ServerState, version: int) -> ArrayRecord:
    """Return an older version of the global model, which clients still train from.

    Args:
        state: the server state before the current round.
        version: the round after which the global model had this version.

    Raises:
        KeyError: the state does not hold this version.
    """
    return state.arrays if version == state.round_number else state.versions[version]


def kept_versions(state: ServerState, pending: frozenset[int]) -> dict[int, ArrayRecord]:
    """Return the older versions of the global model to keep after a round, by version.

    Args:
        state: the server state before the round.
        pending: the versions that clients still train from after the round.
    """
    known = {**state.versions, state.round_number: state.arrays}
    return {version: known[version] for version in sorted(pending) if version in known}


def as_current(
    reply: TrainReply, start: ArrayRecord, state: ServerState, version: int
) -> TrainReply:
    """Return a reply whose model is x + (1 + s)^(-1/2) (y - x_start) for the current model x.

    A reply whose arrays differ from the model's is returned unchanged; the aggregator refuses it.

    Args:
        reply: the client's reply, with its trained model y.
        start: the model x_start that the client started from.
        state: the server state before the round, with the current model x.
        version: the round after which the client started; s is the number of rounds since then.
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
    """Handles clients of asynchronous rounds, which start from the model of an earlier round.

    Args:
        schedule: the schedule of the clients' starts and answers.
    """

    def __init__(self, schedule: BufferedSchedule) -> None:
        self._schedule = schedule
        self._state: ServerState
        self._round: BufferedRound

    def begin(self, state: ServerState, aggregator: Aggregator[Any]) -> None:
        """Look up the round in the schedule."""
        self._state, self._round = state, self._schedule.round(state.round_number + 1)

    def start(self, client: int) -> ArrayRecord:
        """Return the model that a client started from."""
        return version_of(self._state, self._round.start_of(client))

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Return a client's answer, turned into an update of the current global model."""
        if not isinstance(answer, TrainReply):
            return answer
        version = self._round.start_of(client)
        return as_current(answer, self.start(client), self._state, version)

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the state with the model versions that clients still train from."""
        return replace(state, versions=kept_versions(self._state, self._round.pending))

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Add the simulated time and each participant's staleness to the report."""
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

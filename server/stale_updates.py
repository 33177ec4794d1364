"""Updates of clients that started from an older global model (FedBuff, Nguyen et al. 2022).

The server keeps the older models that clients still train from. Every value that this module
computes depends only on earlier releases and public numbers, so it is post-processing.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.messages import TrainReply
from fedsim.server.aggregation.aggregator import (
    Aggregator,
    ClientAnswer,
    InvalidUpdateError,
    check_update,
)
from fedsim.server.participation.buffered import BufferedRound, BufferedSchedule
from fedsim.server.round_parts import Aggregate, RoundPart
from fedsim.server.round_report import RoundReport


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
        version = self._round.start_of(client)
        state = self._state
        return state.arrays if version == state.round_number else state.versions[version]

    def take(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Return a client's answer, turned into an update of the current global model.

        Let x be the current model, y the trained model, and x_start the model from which the client
        started. With staleness s, the reply's new model is x + (1 + s)^(-1/2) (y - x_start).

        A reply whose arrays do not fit the model is returned unchanged; the aggregator refuses it.
        """
        staleness = self._state.round_number - self._round.start_of(client)
        if not isinstance(answer, TrainReply) or not staleness:
            return answer
        trained, now = answer.arrays, self._state.values
        try:
            check_update(trained, now)
        except InvalidUpdateError:
            return answer
        began, scale = to_numpy(self.start(client)), float((1 + staleness) ** -0.5)
        moved = {name: _moved(now[name], trained[name], began[name], scale) for name in now}
        return replace(answer, arrays=moved)

    def after(self, state: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state with the older global models that clients still train from."""
        before = self._state
        known = {**before.versions, before.round_number: before.arrays}
        kept = {n: known[n] for n in sorted(self._round.pending) if n in known}
        return replace(state, versions=kept)

    def complete(self, report: RoundReport, aggregate: Aggregate) -> RoundReport:
        """Return the report with the simulated time and each participant's staleness added."""
        now, round_ = self._state.round_number, self._round
        staleness = {client: now - round_.start_of(client) for client in aggregate.clients}
        clients = replace(report.clients, staleness=staleness)
        return replace(
            report, clients=clients, cost=replace(report.cost, simulated_time=round_.time)
        )


def _moved(now: np.ndarray, trained: np.ndarray, began: np.ndarray, scale: float) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # the aggregator refuses such values
        moved = now + scale * np.subtract(trained, began, dtype=np.float64)
        whole = not np.issubdtype(now.dtype, np.floating)
        return np.asarray(np.rint(moved) if whole else moved).astype(now.dtype)

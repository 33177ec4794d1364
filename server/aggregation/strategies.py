"""Flower strategies of fedsim: who is asked, and what becomes of the answers."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.protocol.messages import ProtocolError, TrainRequest, Withdrawal
from fedsim.server.aggregation.aggregator import (
    AggregationResult,
    Aggregator,
    ClientAnswer,
    PlainAggregator,
    RoundAbortedError,
)
from fedsim.server.aggregation.mean import InvalidUpdateError
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.evaluation import ClientEvaluation, EvaluationResult
from fedsim.server.participation import Participation
from fedsim.server.settings import FederationSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A client whose update did not become part of the round, and why."""

    client: int
    reason: str


@dataclass
class RoundOutcome:
    """What came back in one round."""

    participants: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    withdrawn: list[Withdrawal] = field(default_factory=list)
    shortened: dict[int, int] = field(default_factory=dict)  # steps of who took fewer than asked
    aborted: str | None = None  # why the round was given up
    retried: int = 0  # questions that had to be asked again
    clipped: int = 0  # values of updates that were clipped before they were summed
    clipped_metrics: int = 0  # clients that clipped a metric of theirs
    metrics: Mapping[str, float] = field(default_factory=dict)  # means that clients declared


class FedAvg(Strategy):
    """Federated averaging: the next global model is the weighted mean of the clients' models.

    Replies are consumed as they come and summed in client order. A failed client is left out of
    the mean and named in `outcome`; the weights of the others do not change, only their total.
    A client that withdrew is not asked again.

    Args:
        settings: rounds, participation and weighting.
        participation: the schedule of who trains when.
        roster: the client held by each node, by node id.
        book: where privacy statements are recorded; None in a federation without privacy.
        steps: local steps of a round.
        withdrawn: clients that withdrew before.
        averaging: adds the updates up; None: in clear.
        clip_norms: the bound that the clipping of each client has learnt before.
        evaluation: who evaluates the model of a round on held-out examples; None: nobody.

    Attributes:
        evaluated: what clients found of the last round's model; None where nobody was asked.
        clip_norms: as after the last round. A client whose update is not in the average goes on
            from the bound that it had, as if it had not been asked.

    Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", Algorithm 1.
    """

    def __init__(
        self,
        *,
        settings: FederationSettings,
        participation: Participation,
        roster: Mapping[int, int],
        book: ClientLedgers | None,
        steps: int | None = None,
        withdrawn: Iterable[int] = (),
        clip_norms: Mapping[int, float] | None = None,
        averaging: Aggregator[Any] | None = None,
        evaluation: ClientEvaluation | None = None,
    ) -> None:
        self._evaluation = evaluation
        self._asked_to_evaluate: list[int] = []
        self.evaluated: EvaluationResult | None = None
        self._averaging = averaging or PlainAggregator(settings.weighting)
        self._deadline = settings.deadline
        self._participation = participation
        self._client_of = dict(roster)
        self._node_of = {client: node for node, client in roster.items()}
        self._book = book
        self._steps = steps
        self.withdrawn = set(withdrawn)
        self.clip_norms = dict(clip_norms or {})
        self._learnt: dict[int, float] = {}
        self._asked: tuple[int, ...] = ()
        self._begun = False
        self.outcome = RoundOutcome()

    def summary(self) -> None:
        """Log one line about the strategy."""
        logger.info("FedAvg over %d clients, %s", len(self._node_of), self._averaging.name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the scheduled clients, in ascending order, to train from `arrays`."""
        scheduled = self._participation.in_round(server_round)
        self._asked = tuple(client for client in scheduled if client not in self.withdrawn)
        self.outcome = RoundOutcome()
        self._begun, self._learnt = True, {}
        try:
            offer = self._averaging.begin(server_round, arrays, self._asked, grid)
        except RoundAbortedError as error:
            self._abort(error)
            self._asked = ()
            return []
        return [
            TrainRequest(server_round, arrays, offer, self.clip_norms.get(client)).to_message(
                self._node_of[client]
            )
            for client in self._asked
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies; None where no client succeeded (the model then stays)."""
        if not self._begun:
            raise RuntimeError("aggregate_train called before configure_train")
        self._begun = False
        if self.outcome.aborted is not None:
            return None, None
        silent = set(self._asked)
        for reply in replies:
            client = self._client_of[reply.metadata.src_node_id]
            silent.discard(client)
            self._take(client, reply)
        for client in sorted(silent):
            self._leave_out(client, "no reply")
        averaged = self._averaged()
        for client, reason in averaged.lost.items():
            self.outcome.participants.remove(client)
            self.outcome.shortened.pop(client, None)
            self._fail(client, reason)
        for client in self.outcome.participants:
            if client in self._learnt:
                self.clip_norms[client] = self._learnt[client]
        self.outcome.retried = self._averaging.retried
        self.outcome.metrics = averaged.metrics
        self.outcome.clipped = averaged.clipped
        self.outcome.clipped_metrics = averaged.clipped_metrics
        self.outcome.participants.sort()
        self.outcome.failed.sort(key=lambda failure: failure.client)
        self.outcome.withdrawn.sort(key=lambda withdrawal: withdrawal.client)
        return averaged.arrays, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that evaluate the model of this round, where that is due."""
        self.evaluated = None
        if self._evaluation is None:
            return []
        requests = self._evaluation.requests(server_round, arrays, self._node_of)
        self._asked_to_evaluate = [self._client_of[one.metadata.dst_node_id] for one in requests]
        return requests

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average what clients found; None where nobody was asked, or found anything."""
        if self._evaluation is None or not self._asked_to_evaluate:
            return None
        self.evaluated = self._evaluation.averaged(
            self._asked_to_evaluate, replies, self._client_of
        )
        return MetricRecord(dict(self.evaluated.metrics)) if self.evaluated.clients else None

    def _take(self, client: int, reply: Message) -> None:
        if reply.has_error():
            self._leave_out(client, reply.error.reason or "no reason given")
            return
        try:
            withdrawal = Withdrawal.from_message(reply)
            if withdrawal is not None:
                self._withdraw(client, withdrawal)
                self._averaging.skip(client)
                return
            answer = self._averaging.read(reply)
            self._record_privacy(client, answer)
        except ProtocolError as error:
            self._leave_out(client, str(error))
            return
        if self._deadline is not None and answer.delay > self._deadline:
            late = f"answered after {answer.delay:g} s, past the deadline of {self._deadline:g} s"
            self._leave_out(client, late)
            return
        try:
            self._averaging.add(client, answer)
        except InvalidUpdateError as error:
            self._fail(client, str(error))
            return
        self.outcome.participants.append(client)
        if answer.clip_norm is not None:
            self._learnt[client] = answer.clip_norm
        taken = None if answer.privacy is None else answer.privacy.round_steps
        if taken is not None and self._steps is not None and taken < self._steps:
            self.outcome.shortened[client] = taken

    def _averaged(self) -> AggregationResult:
        """Return what came of the round; of one that was given up, every update is lost."""
        try:
            return self._averaging.finish()
        except RoundAbortedError as error:
            self._abort(error)
            reason = f"its update was lost with the round: {error}"
            return AggregationResult(None, dict.fromkeys(sorted(self.outcome.participants), reason))

    def _abort(self, error: RoundAbortedError) -> None:
        logger.warning("the round was given up: %s", error)
        self.outcome.aborted = str(error)

    def _leave_out(self, client: int, reason: str) -> None:
        self._averaging.skip(client)
        self._fail(client, reason)

    def _withdraw(self, client: int, withdrawal: Withdrawal) -> None:
        if withdrawal.client != client:
            raise ProtocolError(f"the withdrawal is of client {withdrawal.client}")
        logger.info("client %d withdrew: %s", client, withdrawal.reason)
        self.withdrawn.add(client)
        self.outcome.withdrawn.append(withdrawal)

    def _record_privacy(self, client: int, answer: ClientAnswer) -> None:
        if self._book is None:
            return
        if answer.privacy is None:
            raise ProtocolError("the reply carries no privacy statement")
        if answer.privacy.client != client:
            raise ProtocolError(f"the privacy statement is of client {answer.privacy.client}")
        self._book.record(answer.privacy)

    def _fail(self, client: int, reason: str) -> None:
        logger.info("client %d failed: %s", client, reason)
        self.outcome.failed.append(Failure(client, reason))

"""Training in one round: the server asks clients, checks their replies and aggregates them.

A client that dies, fails or replies too late is left out of the aggregate. The round's report names
it with the reason. The privacy charge of the client still counts.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.algorithms.algorithm import Algorithm, Contribution, Update
from fedsim.algorithms.state import ServerState
from fedsim.core.plugin_errors import plugin_calls
from fedsim.protocol.arrays import to_arrays, upload_base, with_round, without_update
from fedsim.protocol.errors import ENDS_RUN, FederationError, ProtocolError
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal
from fedsim.protocol.traffic import NO_REPLY, ClientError, TrainAnswer
from fedsim.server.aggregation.aggregator import (
    AggregationResult,
    Aggregator,
    ClientAnswer,
    InvalidUpdateError,
    RoundAbortedError,
)
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.evaluation import ClientEvaluation
from fedsim.server.participation.participation import Participation
from fedsim.server.round_parts import Aggregate, Metrics, RoundPart
from fedsim.server.round_report import Failure, RoundClients

logger = logging.getLogger(__name__)


class PlannedSteps(Protocol):
    """Plan of the local steps of each client in each round; it depends on public values only."""

    def local_steps(self, client: int, round_number: int) -> int:
        """Return the number of local steps that a client takes in a round."""
        ...

    def charged_steps(self, client: int, round_number: int) -> int:
        """Return the number of steps that a client is charged for in a round.

        If a client releases only its whole update, that counts as one step.
        """
        ...


@dataclass(frozen=True)
class RoundSetup:
    """The objects and settings that all rounds of a server share.

    Attributes:
        algorithm: the federated algorithm.
        participation: which clients take part in each round.
        clients: the client number of each node, by node id.
        aggregator: the object that aggregates the updates of each round.
        evaluate: function that returns the metrics of one or several models on the public test set.
        weights: the aggregation weights of the clients; train requests contain them unless all are
            1.
        steps: the planned number of local steps of each client in each round.
        deadline: the simulated seconds after which a reply is too late; None for no deadline.
        evaluation: the evaluation on clients' held-out examples; None without it.
        parts: the optional parts of a round, in the order in which their hooks are called.
        given_up: the reason to give up a round, by its number: a replay gives up the rounds that
            the run gave up, whatever was the cause there.
    """

    algorithm: Algorithm
    participation: Participation
    clients: Mapping[int, int]
    aggregator: Aggregator[Any]
    evaluate: Callable[[ArrayRecord | Sequence[ArrayRecord]], Metrics]
    weights: ClientWeights
    steps: PlannedSteps
    deadline: float | None = None
    evaluation: ClientEvaluation | None = None
    parts: tuple[RoundPart, ...] = ()
    given_up: Mapping[int, str] = field(default_factory=dict[int, str])

    @cached_property
    def nodes(self) -> Mapping[int, int]:
        """Node id of each client, by client number."""
        return {client: node for node, client in self.clients.items()}


class TrainRound:
    """Training of one round, from the train requests to the new server state.

    Replies are processed on arrival and summed in the order of client numbers. A failed client is
    left out of the aggregate. The aggregation weights of the other clients do not change.

    Args:
        state: the server state before the round. Clients in `withdrawn` are not asked.
        setup: the objects and settings that all rounds share.

    Attributes:
        round_number: the round, from 1.
        aborted: the reason if the round was aborted, else None.
        result: the aggregate, known after `finish`.
    """

    def __init__(self, state: ServerState, setup: RoundSetup) -> None:
        self._state, self._setup = state, setup
        self.round_number = state.round_number + 1
        self.aborted: str | None = None
        self.result = AggregationResult(None)
        self._requests: dict[object, TrainRequest] = {}
        self._silent: set[int] = set()  # clients that have not answered yet
        self._contributions: dict[int, Contribution] = {}  # of clients in the aggregate
        self._shortened: dict[int, int] = {}
        self._failed: list[Failure] = []
        self._withdrawn: list[Withdrawal] = []

    @property
    def clients(self) -> RoundClients:
        """Outcome of the round for each of its clients, known after `finish`."""
        setup, number = self._setup, self.round_number
        participants = self.aggregate.clients
        slow = setup.participation.stragglers_in(number)
        return RoundClients(
            participants=tuple(participants),
            failed=tuple(sorted(self._failed, key=lambda failure: failure.client)),
            withdrawn=tuple(sorted(self._withdrawn, key=lambda withdrawal: withdrawal.client)),
            shortened=dict(sorted(self._shortened.items())),
            partial={
                client: setup.steps.local_steps(client, number)
                for client in participants
                if client in slow
            },
        )

    @cached_property
    def aggregate(self) -> Aggregate:
        """Clients in the aggregate, each with its number of charged steps; known after `finish`."""
        clients, planned = sorted(self._contributions), self._setup.steps.charged_steps
        steps = {
            client: self._shortened.get(client, planned(client, self.round_number))
            for client in clients
        }
        has_model = self.result.arrays is not None
        return Aggregate(clients, steps, self.result.clip_count, has_model)

    def requests(self, grid: Grid) -> dict[int, TrainRequest]:
        """Return the train requests by node id, ascending by client; empty for an aborted round.

        Args:
            grid: Flower's grid, over which the aggregator asks the helpers of secure aggregation.
        """
        state, setup = self._state, self._setup
        for part in setup.parts:
            part.begin(state, setup.aggregator)
        drawn = setup.participation.draw(self.round_number)
        asked = tuple(client for client in drawn if client not in state.withdrawn)
        try:
            offer = setup.aggregator.begin(self.round_number, state.arrays, asked, grid)
        except RoundAbortedError as error:
            self._abort(error)
            return {}
        self._silent = set(asked)
        with plugin_calls("federation.strategy failed", raises=FederationError):
            return {setup.nodes[client]: self._request(client, offer) for client in asked}

    def _request(self, client: int, offer: ConfigRecord | None) -> TrainRequest:
        """Return the train request to one client."""
        state, setup = self._state, self._setup
        start = setup.algorithm.start(state, client)
        sent = setup.algorithm.send(state, client)
        if set(sent) != set(setup.algorithm.sent_arrays()):
            raise ValueError(f"send returned {sorted(sent)}, which `wire` does not declare")
        arrays = self._start(client) if start is None else to_arrays(start)
        norm, weight = state.clip_norms.get(client), setup.weights.announced(client)
        key = id(arrays), norm, weight
        if not sent and key in self._requests:  # equal requests are one object
            return self._requests[key]
        records = {name: to_arrays(values) for name, values in sent.items()}
        request = TrainRequest(self.round_number, arrays, offer, norm, weight, records)
        if not sent:
            self._requests[key] = request
        return request

    def _start(self, client: int) -> ArrayRecord:
        """Return the global model that a client starts from."""
        for part in self._setup.parts:
            start = part.start(client)
            if start is not None:
                return start
        return self._state.arrays

    def take(self, node: int, answer: TrainAnswer) -> bool:
        """Check a client's answer and add it to the aggregate.

        Returns:
            Whether the round continues. It stops if this client's failure ends the run, so that no
            other client is charged.
        """
        client = self._setup.clients[node]
        self._silent.discard(client)
        if isinstance(answer, ClientError):
            # No client of a secret round may end it: the end would show that it was drawn.
            ends_run = answer.code in ENDS_RUN and not self._is_secret
            self._skip(client, answer.reason, ends_run=ends_run)
            if ends_run:
                self._abort(RoundAbortedError(answer.reason))
            return not ends_run
        try:
            if isinstance(answer, Withdrawal):
                self._withdraw(client, answer)
            else:
                self._add(client, answer)
        except ProtocolError as error:
            self._skip(client, str(error))
        except InvalidUpdateError as error:  # the aggregator has skipped it
            self._fail(client, str(error))
        return True

    def _add(self, client: int, answer: TrainReply | SealedReply) -> None:
        """Add a client's reply to the aggregate.

        Raises:
            ProtocolError: the reply is wrong or too late.
            InvalidUpdateError: the aggregator refuses the update.
        """
        setup, aggregator = self._setup, self._setup.aggregator
        if not isinstance(answer, aggregator.reply_type):
            kinds = type(answer).__name__, aggregator.reply_type.__name__
            raise ProtocolError("the client sent a {}, expected a {}".format(*kinds))
        changed: ClientAnswer = answer
        for part in setup.parts:
            changed = part.take(client, changed)
        if setup.deadline is not None and answer.delay > setup.deadline:
            raise ProtocolError(
                f"answered after {answer.delay:g} s, past the deadline of {setup.deadline:g} s"
            )
        planned = setup.steps.charged_steps(client, self.round_number)
        contribution = self._contribution(client, answer, planned)
        with plugin_calls("federation.strategy failed", raises=FederationError):
            factor = float(setup.algorithm.weight(contribution))
            if not 0.0 <= factor < math.inf:
                raise ValueError(f"weight returned {factor}, and must return a finite number >= 0")
            aggregator.weigh(client, factor)
        aggregator.add(client, changed)
        self._contributions[client] = contribution
        taken = None if answer.spend is None else answer.spend.round_steps
        if taken is not None and taken < planned:
            self._shortened[client] = taken

    def _contribution(self, client: int, answer: ClientAnswer, planned: int) -> Contribution:
        """Return a client's weight, steps and declared numbers, which the algorithm uses.

        Args:
            client: the client's number.
            answer: the client's reply.
            planned: number of steps that the client is charged for if its budget allows them.

        Raises:
            ProtocolError: a number that the algorithm declares is missing or not finite.
        """
        setup, number = self._setup, self.round_number
        steps = setup.steps.local_steps(client, number)
        if answer.spend is not None and planned == steps:
            steps = answer.spend.round_steps  # charged by the step
        given = answer.numbers if isinstance(answer, TrainReply) else {}
        names = setup.algorithm.private_numbers()
        for name in names:
            if not math.isfinite(given.get(name, math.nan)):
                raise ProtocolError(
                    f"the reply needs the finite number {name!r} that federation.strategy "
                    f"declares, got {given.get(name)}"
                )
        weight = float(setup.weights.values[client])
        return Contribution(client, weight, steps, {name: given[name] for name in names})

    def finish(self) -> AggregationResult:
        """Return the aggregate of the answers; it has no arrays if no client succeeded.

        The aggregate of an aborted round has no client, and no arrays but for correlated noise.
        """
        for client in sorted(self._silent):
            self._skip(client, NO_REPLY.reason)
        self.result = self._finish()
        for client, reason in self.result.lost.items():
            del self._contributions[client]
            self._shortened.pop(client, None)
            self._fail(client, reason)
        return self.result

    def _finish(self) -> AggregationResult:
        try:
            if self.aborted is None:
                if self.round_number in self._setup.given_up:
                    raise RoundAbortedError(self._setup.given_up[self.round_number])
                return self._setup.aggregator.finish()
        except RoundAbortedError as error:
            self._abort(error)
        reason = f"its update was lost with the round: {self.aborted}"
        lost = dict.fromkeys(sorted(self._contributions), reason)
        if any(failure.ends_run for failure in self._failed):
            return AggregationResult(None, lost)  # the round is repeated when the run resumes
        return replace(self._setup.aggregator.give_up(), lost=lost)

    def state_after(self) -> ServerState:
        """Return the server state after the round; without an aggregate, the model stays the same.

        Raises:
            FederationError: the code of the federated algorithm raised an error.
        """
        state, aggregate = self._state, self.aggregate
        if aggregate.has_model:
            came = tuple(self._contributions[client] for client in aggregate.clients)
            update = Update(self.result.values, came, self.result.models)
            with plugin_calls("federation.strategy failed", raises=FederationError):
                before = replace(state, arrays=upload_base(state.arrays))
                after = self._setup.algorithm.server(before, update)
            state = replace(after, arrays=with_round(state.arrays, after.arrays))
        else:
            state = replace(state, arrays=without_update(state.arrays))
        state = replace(
            state,
            round_number=self.round_number,
            withdrawn=self._state.withdrawn | {withdrawal.client for withdrawal in self._withdrawn},
        )
        for part in self._setup.parts:
            state = part.after(state, aggregate)
        return state

    def _abort(self, error: RoundAbortedError) -> None:
        logger.warning("the round was given up: %s", error)
        self.aborted = str(error)

    def _skip(self, client: int, reason: str, *, ends_run: bool = False) -> None:
        self._setup.aggregator.skip(client)
        self._fail(client, reason, ends_run=ends_run)

    def _fail(self, client: int, reason: str, *, ends_run: bool = False) -> None:
        if not self._is_secret:
            logger.info("client %d failed: %s", client, reason)
        self._failed.append(Failure(client, reason, ends_run))

    def _withdraw(self, client: int, withdrawal: Withdrawal) -> None:
        """Record that a client has left the federation.

        Raises:
            ProtocolError: the withdrawal names another client, or would show who takes part.
        """
        if withdrawal.client != client:
            raise ProtocolError(f"the withdrawal names client {withdrawal.client}")
        if self._is_secret:
            raise ProtocolError("a client cannot withdraw where participation is secret")
        logger.info("client %d withdrew: %s", client, withdrawal.reason)
        self._withdrawn.append(withdrawal)
        self._setup.aggregator.skip(client)

    @property
    def _is_secret(self) -> bool:
        return self._setup.participation.is_secret

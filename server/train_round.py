"""The training part of one round: requests to clients, their replies checked and aggregated.

A client that dies, fails, or replies too late is left out of the aggregate and named in the round's
report with the reason (`TrainRound.aggregate`). Its charge stays in its account.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.algorithms.algorithm import Algorithm, Contribution, Update
from fedsim.algorithms.state import ServerState
from fedsim.core.plugin_errors import plugin_calls
from fedsim.protocol.arrays import digest, to_arrays, upload_base, with_round, without_update
from fedsim.protocol.channel import TrainAnswer
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ENDS_RUN, FederationError, ProtocolError
from fedsim.protocol.exchange import NO_REPLY, ClientError
from fedsim.protocol.messages import TrainReply, TrainRequest, Withdrawal
from fedsim.protocol.noisy_sums import LearntBound
from fedsim.protocol.upload_tags import UploadTags
from fedsim.server.aggregation.aggregator import (
    AggregationResult,
    Aggregator,
    ClientAnswer,
    InvalidUpdateError,
    RoundAbortedError,
)
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.iterate_average import next_average
from fedsim.server.participation.buffered import BufferedRound
from fedsim.server.participation.participation import Participation
from fedsim.server.round_report import Failure
from fedsim.server.shared_bound import SharedBound
from fedsim.server.stale_updates import as_current, kept_versions, version_of

logger = logging.getLogger(__name__)

ChargeRound = Callable[[int, str], Sequence[ClientSpend]]
"""(round, digest of its global model) -> the spend of every client, all charged on disk."""

ExpectedNoise = Callable[[Mapping[int, int], Mapping[int, LearntBound], int], float | None]
"""(steps of each participant, adapted bounds, round) -> length of the noise in the aggregate.

By public plan values alone.
"""

PlannedSteps = Callable[[int, int], int]
"""(client, round) -> planned steps of the client in the round, as ledgers count them."""


@dataclass(frozen=True)
class TrainSetup:
    """The part of the server's set-up that training uses, the same in all rounds.

    Attributes:
        algorithm: what clients get and start from, and how uploads become the next model.
        participation: the schedule of each client's rounds.
        clients: the client of each node, by node id.
        aggregator: aggregates the updates of one round after another.
        ledgers: the ledgers of the clients; None without privacy.
        steps: planned steps; None: shortened rounds are not reported.
        deadline: simulated seconds after which a reply comes too late; None: never.
        upload_tags: makes the tags of uploads; None: they are not recorded.
        weights: the weights of all clients, which requests announce; None: they announce none.
        charge_round: charges every client for a round before it begins, where participation is
            secret; None: clients charge themselves.
        shared_bound: learns the bound of whole updates; None: it is fixed, or clients learn it.
        expected_noise: length of the noise in an aggregate; None: not known.
        local_steps: (client, round) -> planned steps of its local training, by public facts.
    """

    algorithm: Algorithm
    participation: Participation
    clients: Mapping[int, int]
    aggregator: Aggregator[Any]
    ledgers: ClientLedgers | None = None
    steps: PlannedSteps | None = None
    deadline: float | None = None
    upload_tags: UploadTags | None = None
    weights: ClientWeights | None = None
    charge_round: ChargeRound | None = None
    shared_bound: SharedBound | None = None
    expected_noise: ExpectedNoise | None = None
    local_steps: Callable[[int, int], int] = lambda client, round_number: 1

    @cached_property
    def nodes(self) -> Mapping[int, int]:
        """The node of each client, by client."""
        return {client: node for node, client in self.clients.items()}


class TrainRound:
    """One round of training.

    Replies are consumed on arrival and summed in client order. A failed client is left out of the
    aggregate; the weights of the others do not change, only their total.

    Args:
        state: the state before the round. Clients in `withdrawn` are not asked.
        setup: see there.

    Attributes:
        participants: clients in the aggregate, ascending after `aggregate`.
        failed: clients that dropped out, ascending after `aggregate`.
        withdrawn: clients that withdrew in this round, ascending after `aggregate`.
        shortened: steps of each client that took fewer than planned.
        uploads: tag of the released values of each client that sent them in clear, whether they
            became part of the aggregate or not.
        aborted: why the round was given up; None otherwise.
    """

    def __init__(self, state: ServerState, setup: TrainSetup) -> None:
        self._state, self._setup = state, setup
        self.round_number = state.round_number + 1
        self._asked: tuple[int, ...] = ()
        self._adapted_clip_norms: dict[int, LearntBound] = {}
        self._clip_counts: dict[int, float] = {}
        self._clip_sum: int | None = None
        self._end_of_run: str | None = None  # the reason of the first client that ends the run
        self.participants: list[int] = []
        self.failed: list[Failure] = []
        self.withdrawn: list[Withdrawal] = []
        self.shortened: dict[int, int] = {}
        self.uploads: dict[int, str] = {}
        self.aborted: str | None = None
        self._contributions: dict[int, Contribution] = {}

    @property
    def clip_norms(self) -> Mapping[int, LearntBound]:
        """Adapted clipping bounds after the round; a client outside the aggregate keeps its own."""
        shared = self._setup.shared_bound
        if shared is not None:
            bound, came = shared.of(self._state.clip_norms), self.participants
            if shared.unit is not None:
                return shared.after_sum(bound, self._clip_sum, len(came))
            return shared.after_bits(bound, [self._clip_counts[client] for client in came])
        adapted = {
            client: self._adapted_clip_norms[client]
            for client in self.participants
            if client in self._adapted_clip_norms
        }
        return dict(sorted({**self._state.clip_norms, **adapted}.items()))

    @property
    def noise_norm(self) -> float | None:
        """Expected length of the noise in the aggregate update; None where it is not known."""
        expected, planned = self._setup.expected_noise, self._setup.steps
        if expected is None or planned is None:
            return None
        steps = {
            client: self.shortened.get(client, planned(client, self.round_number))
            for client in self.participants
        }
        return expected(steps, self._state.clip_norms, self.round_number)

    def requests(self, grid: Grid) -> dict[int, TrainRequest]:
        """Return the requests by node, in ascending order of clients; none for an aborted round.

        Args:
            grid: for the aggregator, which may have to ask helpers first.
        """
        state, setup = self._state, self._setup
        self._charge_all()
        if setup.shared_bound is not None:
            setup.aggregator.scale(setup.shared_bound.of(state.clip_norms))
        drawn = setup.participation.draw(self.round_number)
        asked = tuple(client for client in drawn if client not in state.withdrawn)
        try:
            offer = setup.aggregator.begin(self.round_number, state.arrays, asked, grid)
        except RoundAbortedError as error:
            self._abort(error)
            return {}
        self._asked = asked
        with plugin_calls("federation.strategy failed", raises=FederationError):
            return {setup.nodes[client]: self._request(client, offer) for client in asked}

    def _request(self, client: int, offer: ConfigRecord | None) -> TrainRequest:
        """Return the request to one client."""
        state, setup = self._state, self._setup
        own = setup.algorithm.start(state, client)
        sent = setup.algorithm.send(state, client)
        if set(sent) != set(setup.algorithm.sent_arrays()):
            raise ValueError(f"send returned {sorted(sent)}, which `wire` does not declare")
        return TrainRequest(
            self.round_number,
            self._start(client) if own is None else to_arrays(dict(own)),
            offer,
            state.clip_norms.get(client),
            None if setup.weights is None else setup.weights.announced(client),
            {name: to_arrays(dict(values)) for name, values in sent.items()},
        )

    @cached_property
    def _buffer(self) -> BufferedRound | None:
        """The buffer of an asynchronous round; None where all clients start with the round."""
        buffered = self._setup.participation.buffered
        return None if buffered is None else buffered.round(self.round_number)

    @property
    def partial(self) -> dict[int, int]:
        """Local steps of each participant that does a part of its work, by the schedule."""
        slow = self._setup.participation.stragglers_in(self.round_number)
        steps = self._setup.local_steps
        return {one: steps(one, self.round_number) for one in self.participants if one in slow}

    @property
    def simulated_time(self) -> float | None:
        """The simulated time at which an asynchronous round ends; None for other rounds."""
        return None if self._buffer is None else self._buffer.time

    @property
    def staleness(self) -> dict[int, int]:
        """The staleness of each participant of an asynchronous round."""
        if self._buffer is None:
            return {}
        return {one: self._state.round_number - self._version(one) for one in self.participants}

    def _version(self, client: int) -> int:
        """Return the round after which a client started."""
        if self._buffer is None:
            return self._state.round_number
        return self._buffer.start_of(client)

    def _start(self, client: int) -> ArrayRecord:
        """Return the global model that a client starts from."""
        return version_of(self._state, self._version(client))

    def aggregate(self, answers: Iterable[tuple[int, TrainAnswer]]) -> AggregationResult:
        """Return the aggregate of the answers; without arrays where no client succeeded.

        Args:
            answers: node and answer of each client.
        """
        if self.aborted is not None:
            return AggregationResult(None)
        silent = set(self._asked)
        for node, answer in answers:
            client = self._setup.clients[node]
            silent.discard(client)
            self._take(client, answer)
            if self._end_of_run is not None:
                break  # no further client is to be charged
        for client in sorted(silent):
            self._skip(client, NO_REPLY.reason)
        result = self._finish()
        self._clip_sum = result.clip_count
        for client, reason in result.lost.items():
            self.participants.remove(client)
            self.shortened.pop(client, None)
            self._fail(client, reason)
        self.participants.sort()
        self.failed.sort(key=lambda failure: failure.client)
        self.withdrawn.sort(key=lambda withdrawal: withdrawal.client)
        self.shortened = dict(sorted(self.shortened.items()))
        return result

    def state_after(
        self, result: AggregationResult, *, averaging: float | None = None
    ) -> ServerState:
        """Return the state after the round; without an aggregate the model stays as it was.

        Args:
            result: the aggregate of the round.
            averaging: `federation.server_averaging`.

        Raises:
            FederationError: the algorithm fails.
        """
        state = self._state
        if result.arrays is not None:
            came = tuple(self._contributions[client] for client in self.participants)
            update = Update(result.values, came, result.models)
            with plugin_calls("federation.strategy failed", raises=FederationError):
                before = replace(state, arrays=upload_base(state.arrays))
                after = self._setup.algorithm.server(before, update)
            state = replace(after, arrays=with_round(state.arrays, after.arrays))
        else:
            state = replace(state, arrays=without_update(state.arrays))
        average = state.average
        if averaging is not None:
            average = next_average(
                average, state.arrays, round_number=self.round_number, decay=averaging
            )
        return replace(
            state,
            round_number=self.round_number,
            clip_norms=self.clip_norms,
            withdrawn=self._state.withdrawn | {one.client for one in self.withdrawn},
            average=average,
            versions={}
            if self._buffer is None
            else kept_versions(self._state, self._buffer.pending),
        )

    def _take(self, client: int, answer: TrainAnswer) -> None:
        aggregator, deadline = self._setup.aggregator, self._setup.deadline
        if isinstance(answer, ClientError):
            # No client of a secret round may end it: the end would show that it was drawn.
            ends_run = answer.code in ENDS_RUN and not self._is_secret
            if ends_run:
                self._end_of_run = answer.reason
            self._skip(client, answer.reason, ends_run=ends_run)
            return
        try:
            if isinstance(answer, Withdrawal):
                self._withdraw(client, answer)
                aggregator.skip(client)
                return
            if not isinstance(answer, aggregator.reply_type):
                kinds = type(answer).__name__, aggregator.reply_type.__name__
                raise ProtocolError("the client sent a {}, expected a {}".format(*kinds))
            if isinstance(answer, TrainReply) and self._setup.upload_tags is not None:
                tag = self._setup.upload_tags.of(client, self.round_number, answer)
                self.uploads[client] = tag
            self._take_count(client, answer)
            self._check_numbers(answer)
            self._record_privacy(client, answer)
        except ProtocolError as error:
            self._skip(client, str(error))
            return
        if deadline is not None and answer.delay > deadline:
            late = f"answered after {answer.delay:g} s, past the deadline of {deadline:g} s"
            self._skip(client, late)
            return
        contribution = self._contribution(client, answer)
        try:
            aggregator.weigh(client, self._setup.algorithm.weight(contribution))
            aggregator.add(client, self._current(client, answer))
        except InvalidUpdateError as error:
            self._fail(client, str(error))
            return
        self._contributions[client] = contribution
        self.participants.append(client)
        if answer.clip_norm is not None:
            self._adapted_clip_norms[client] = answer.clip_norm
        planned = self._setup.steps
        taken = None if answer.spend is None else answer.spend.round_steps
        if taken is None or planned is None:
            return
        if taken < planned(client, self.round_number):
            self.shortened[client] = taken

    def _current(self, client: int, answer: ClientAnswer) -> ClientAnswer:
        """Return an answer as an update of the current global model; only stale ones differ."""
        if self._buffer is None or not isinstance(answer, TrainReply):
            return answer
        return as_current(answer, self._start(client), self._state, self._version(client))

    def _contribution(self, client: int, answer: ClientAnswer) -> Contribution:
        """Return the facts of an answer that the algorithm uses."""
        setup = self._setup
        steps = setup.local_steps(client, self.round_number)
        charged = None if setup.steps is None else setup.steps(client, self.round_number)
        if answer.spend is not None and charged == steps:  # charged by the step
            steps = answer.spend.round_steps
        weights = setup.weights
        return Contribution(
            client,
            1.0 if weights is None else float(weights.values[client]),
            steps,
            self._numbers(answer),
        )

    def _numbers(self, answer: ClientAnswer) -> dict[str, float]:
        """Return the numbers of a reply that the algorithm declares; others are left out."""
        given = answer.numbers if isinstance(answer, TrainReply) else {}
        names = self._setup.algorithm.private_numbers()
        return {name: given[name] for name in names if name in given}

    def _check_numbers(self, answer: ClientAnswer) -> None:
        """Check that a reply has the finite numbers that the algorithm declares."""
        given = self._numbers(answer)
        for name in self._setup.algorithm.private_numbers():
            if not math.isfinite(given.get(name, math.nan)):
                raise ProtocolError(
                    f"the reply needs the finite number {name!r} that federation.strategy "
                    f"declares, got {given.get(name)}"
                )

    def _take_count(self, client: int, answer: ClientAnswer) -> None:
        """Note the noisy bit of a reply where the server learns the bound from replies."""
        shared = self._setup.shared_bound
        if shared is None or shared.unit is not None:
            return
        if not isinstance(answer, TrainReply) or answer.clip_count is None:
            raise ProtocolError("the reply lacks the noisy bit that the bound is learnt from")
        self._clip_counts[client] = answer.clip_count

    def _finish(self) -> AggregationResult:
        """Return the aggregator's result; the updates of an aborted round are lost."""
        try:
            if self._end_of_run is not None:
                raise RoundAbortedError(self._end_of_run)
            return self._setup.aggregator.finish()
        except RoundAbortedError as error:
            self._abort(error)
            reason = f"its update was lost with the round: {error}"
            return AggregationResult(None, dict.fromkeys(sorted(self.participants), reason))

    def _abort(self, error: RoundAbortedError) -> None:
        logger.warning("the round was given up: %s", error)
        self.aborted = str(error)

    def _skip(self, client: int, reason: str, *, ends_run: bool = False) -> None:
        self._setup.aggregator.skip(client)
        self._fail(client, reason, ends_run=ends_run)

    def _fail(self, client: int, reason: str, *, ends_run: bool = False) -> None:
        if not self._is_secret:
            logger.info("client %d failed: %s", client, reason)
        self.failed.append(Failure(client, reason, ends_run))

    def _withdraw(self, client: int, withdrawal: Withdrawal) -> None:
        if withdrawal.client != client:
            raise ProtocolError(f"the withdrawal is of client {withdrawal.client}")
        if self._is_secret:
            raise ProtocolError("a client cannot withdraw where participation is secret")
        logger.info("client %d withdrew: %s", client, withdrawal.reason)
        self.withdrawn.append(withdrawal)

    @property
    def _is_secret(self) -> bool:
        return self._setup.participation.is_secret

    def _charge_all(self) -> None:
        """Charge every client for the round where clients do not charge themselves."""
        setup = self._setup
        if setup.charge_round is None:
            return
        for spend in setup.charge_round(self.round_number, digest(self._state.arrays)):
            if setup.ledgers is not None:
                setup.ledgers.record(spend)

    def _record_privacy(self, client: int, answer: ClientAnswer) -> None:
        ledgers = self._setup.ledgers
        if ledgers is None or self._setup.charge_round is not None:
            return
        if answer.spend is None:
            raise ProtocolError("the reply carries no record of the client's spend")
        if answer.spend.client != client:
            raise ProtocolError(f"the record of spend is of client {answer.spend.client}")
        ledgers.record(answer.spend)

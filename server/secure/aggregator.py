"""Aggregator for secure aggregation: the server learns only the sum of the updates."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.protocol.arrays import digest, to_arrays, to_numpy, upload_base
from fedsim.protocol.messages import SECAGG, SealedReply
from fedsim.protocol.secure import HELLO, to_records
from fedsim.secagg.context import NONCE_BYTES, RoundContext, set_digest
from fedsim.secagg.errors import ContextMismatchError, SecureAggregationError, TooFewClientsError
from fedsim.secagg.fields import check_fields
from fedsim.secagg.hpke import check_distinct, load_public_key
from fedsim.secagg.messages import Hello, HelloReply
from fedsim.secagg.payload import NamedArrays, PayloadCodec
from fedsim.secagg.settings import AdditiveSettings, SecureAggregationSettings
from fedsim.server.aggregation.aggregator import (
    AggregationResult,
    Aggregator,
    InvalidUpdateError,
    RoundAbortedError,
)
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.app import RegisteredNodes
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.server.secure.rounds import (
    AdditiveRound,
    MaskedRound,
    QueryChannel,
    SecureRound,
    error_text,
)


class SecureAggregator(Aggregator[SealedReply]):
    """Aggregator for updates of which the server sees only the sum.

    The result is the weighted mean, or the sum if clients send integers.

    Guarantee: a round ends with the exact mean over the clients in the sum, or it is aborted. An
    aborted round names its error and leaves the model unchanged. Every start of a run, also a
    resume, has a new id. Every attempt at a round has a new nonce, so no share is used twice. All
    attempts at a round compute the sum of the same clients (`opened_sums`).

    Args:
        settings: the settings of secure aggregation.
        codec: the encoder of updates as ring elements (integers modulo a power of 2).
        registered: the Flower nodes of all clients and helpers.
        opened_sums: the record of the sums that the server has learned, also in earlier processes.
        weights: the planned weights of all clients; a sum with other weights is refused.
        plan: the digest of the privacy plan; "" without privacy.
    """

    reply_type = SealedReply

    def __init__(
        self,
        *,
        settings: SecureAggregationSettings,
        codec: PayloadCodec,
        registered: RegisteredNodes,
        opened_sums: OpenedSums,
        weights: ClientWeights,
        plan: str = "",
    ) -> None:
        self.name = f"secure aggregation by {settings.protocol.name}"
        self.declared_metrics = tuple(settings.metrics)
        self.ends_run_on_abort = settings.on_abort == "raise"
        self._settings, self._codec = settings, codec
        self._clients = {client: node for node, client in registered.clients.items()}
        self._helpers = {helper: node for node, helper in registered.helpers.items()}
        self._opened_sums, self._weights, self._plan = opened_sums, weights, plan
        self._round_number = 0
        self._run_id = os.urandom(NONCE_BYTES).hex()
        self._hello_replies: dict[int, HelloReply] | None = None
        self._reference: NamedArrays | None = None
        self._secure_round: SecureRound | None = None
        self._channel: QueryChannel | None = None
        self._added: set[int] = set()

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round and return its parameters (the offer), which train requests carry.

        A round with too few clients is aborted here, before any client trains or is charged.

        Args:
            round_number: the round, ≥ 1.
            arrays: the global model at the start of the round.
            clients: the numbers of the round's clients.
            grid: Flower's grid, which transports the messages.

        Raises:
            RoundAbortedError: there are too few clients, or a helper does not answer.
        """
        self.retried, self._added, self._secure_round = 0, set(), None
        self._round_number = round_number
        if not clients:
            return None
        channel = self._channel = self._make_channel(grid)
        with self._abort_on_error():
            if len(clients) < self._settings.min_clients:
                raise TooFewClientsError(
                    f"{len(clients)} clients can be asked, but min_clients is "
                    f"{self._settings.min_clients}; nobody was asked",
                    round_number=round_number,
                )
            self._reference = None if self._codec.is_integers else self._checked(arrays)
            context = RoundContext(
                run_id=self._run_id,
                round_nonce=os.urandom(NONCE_BYTES),
                server_round=round_number,
                layout=self._codec.layout.digest,
                params=self._settings.digest(),
                model=digest(arrays),
                asked=set_digest(clients),
                plan=self._plan,
            )
            self._secure_round = self._make_round(context, clients, channel)
            offer = to_records(self._secure_round.offer)[SECAGG]
        if not isinstance(offer, ConfigRecord):
            raise TypeError("an offer has no arrays")
        return offer

    def add(self, client: int, answer: SealedReply) -> None:
        """Add a client's share, or its public keys, from its train reply.

        Args:
            client: the client's number.
            answer: the client's reply, which holds no readable update.

        Raises:
            InvalidUpdateError: the reply is not accepted, and the client is not in the sum.
        """
        admissible = self._opened_sums.admissible_clients(self._round_number)
        if admissible is not None and client not in admissible:
            raise InvalidUpdateError(
                "it was not in the sum of this round that was requested before the run was "
                "interrupted; it takes part again in the next round"
            )
        try:
            self._current.add(answer.content, client)
        except SecureAggregationError as error:
            raise InvalidUpdateError(error_text(error)) from error
        self._added.add(client)

    def finish(self) -> AggregationResult:
        """Compute the sum and return the aggregated model, or the sums if clients send integers.

        If no upload was added, the result has neither model nor sums.

        Raises:
            RoundAbortedError: the sum cannot be computed, or its weights are not as planned.
        """
        if not self._added:
            return AggregationResult(None)
        secure_round = self._current
        try:
            with self._abort_on_error():
                decoded = secure_round.open(self._reference)
        except RoundAbortedError:
            self._hello_replies = None  # a helper that was restarted has lost the run's key
            raise
        self._secure_round = None
        lost = secure_round.lost_clients()
        self._check_weight(decoded.weight, self._added - lost.keys())
        return AggregationResult(
            None if self._codec.is_integers else to_arrays(decoded.arrays),
            lost,
            sums=decoded.arrays if self._codec.is_integers else None,
            metrics=decoded.metrics,
            clipped=decoded.clipped,
            clipped_metrics=decoded.clipped_metrics,
        )

    def _checked(self, arrays: ArrayRecord) -> NamedArrays | None:
        """Return the model to add decoded changes to, or None where clients send parameters."""
        values = to_numpy(upload_base(arrays))
        self._codec.layout.check(values)
        return values if self._settings.encoding.payload == "delta" else None

    def _check_weight(self, weight: int, clients: Collection[int]) -> None:
        """Check the total weight in a sum against the plan; the single weights are masked."""
        planned = len(clients)
        if not self._codec.is_integers:  # integer updates are already weighted
            planned = sum(self._weights.values[client] for client in clients)
        if weight != planned:
            raise RoundAbortedError(
                f"the weights in the sum of {len(clients)} clients add up to {weight:,}, and their "
                f"planned weights to {planned:,}: a client took another weight, so the sum is not "
                "used; run the same experiment on all nodes"
            )

    @property
    def _current(self) -> SecureRound:
        if self._secure_round is None:
            raise RuntimeError("no round has begun; call begin() first")
        return self._secure_round

    def _make_channel(self, grid: Grid) -> QueryChannel:
        """Return the channel to the parties that hold the other secrets: helpers or clients."""
        protocol = self._settings.protocol
        if isinstance(protocol, AdditiveSettings):
            timeout, retries = protocol.combine_timeout_s, protocol.combine_retries
            return QueryChannel(grid, self._helpers, timeout, retries)
        return QueryChannel(grid, self._clients)

    def _make_round(
        self, context: RoundContext, clients: Sequence[int], channel: QueryChannel
    ) -> SecureRound:
        settings, codec = self._settings, self._codec
        record_opening = partial(self._opened_sums.record_opening, context.server_round)
        if settings.protocol.name.startswith("secagg"):
            server = MaskedSum(codec=codec, context=context, settings=settings, clients=clients)
            return MaskedRound(server, channel, record_opening=record_opening)
        leader = Leader(
            codec=codec,
            context=context,
            helpers=sorted(self._helpers),
            clients=clients,
            min_clients=settings.min_clients,
        )
        hellos = self._helper_keys(channel)
        return AdditiveRound(leader, hellos, channel, record_opening=record_opening)

    def _helper_keys(self, helpers: QueryChannel) -> dict[int, HelloReply]:
        """Return the helpers' keys of this run, asking for them once, or again after an abort."""
        if self._hello_replies is not None:
            return self._hello_replies
        hello = Hello(
            run_id=self._run_id,
            params=self._settings.digest(),
            min_clients=self._settings.min_clients,
        )
        hellos: dict[int, HelloReply] = {}
        queries = dict.fromkeys(self._helpers, hello)
        for helper, reply in helpers.query_with_retries(HELLO, queries, HelloReply):
            check_fields(reply)
            load_public_key(reply.public_key)
            if (reply.helper, reply.run_id) != (helper, self._run_id):
                raise ContextMismatchError(
                    f"helper {helper} answered as helper {reply.helper} of run {reply.run_id!r}"
                )
            hellos[helper] = reply
        check_distinct(reply.public_key for reply in hellos.values())
        self._hello_replies = hellos
        return hellos

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """Raise RoundAbortedError in place of an error of the protocol; read the retries."""
        try:
            yield
        except SecureAggregationError as error:
            raise RoundAbortedError(error_text(error)) from error
        finally:
            self.retried = 0 if self._channel is None else self._channel.retried

"""Aggregation without seeing any update: secure aggregation in place of a plain mean."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedsim.protocol.arrays import (
    digest,
    to_arrays,
    to_numpy,
)
from fedsim.protocol.secure import HELLO, SECAGG, SealedReply, to_records
from fedsim.secagg.context import NONCE_BYTES, RoundContext
from fedsim.secagg.errors import (
    ContextMismatchError,
    SecureAggregationError,
    TooFewClientsError,
)
from fedsim.secagg.layout import Arrays
from fedsim.secagg.messages import Hello, HelloReply
from fedsim.secagg.payload import PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.aggregation.aggregator import AggregationResult, Aggregator, RoundAbortedError
from fedsim.server.aggregation.mean import InvalidUpdateError
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.server.secure.rounds import Exchange, Mail, MaskedRound, SharedRound, named


class SecureAggregator(Aggregator[SealedReply]):
    """The weighted mean of updates of which the server sees only the sum.

    Guarantee: a round ends with the exact mean over the clients in the sum, or is given up with a
    named error and leaves the model as it was. Every run, a resumed one too, has an id of its own,
    and every attempt at a round a nonce of its own, so that no share is used twice; no attempt
    opens a sum of other clients than an earlier one of the same round (`openings`).

    Args:
        settings: the protocol.
        codec: the payload.
        clients: the node of each client.
        helpers: the node of each helper.
        openings: remembers which sums were opened, over restarts, too.
    """

    def __init__(
        self,
        *,
        settings: SecureAggregationSettings,
        codec: PayloadCodec,
        clients: Mapping[int, int],
        helpers: Mapping[int, int],
        openings: OpenedSums,
    ) -> None:
        self.name = f"secure aggregation by {settings.protocol}"
        self._settings, self._codec = settings, codec
        self._clients, self._helpers = clients, helpers
        self._openings = openings
        self._round = 0
        self._run_id = os.urandom(NONCE_BYTES).hex()
        self._hellos: dict[int, HelloReply] | None = None
        self._reference: Arrays | None = None
        self._exchange: Exchange | None = None
        self._added = 0

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round and return the offer that train requests carry.

        Nobody is asked, and charged, for a round with too few clients to be opened.

        Raises:
            RoundAbortedError: too few clients, or a helper cannot be had.
        """
        self.retried, self._added, self._exchange = 0, 0, None
        self._round = round_number
        if not clients:
            return None
        with _giving_up():
            if len(clients) < self._settings.min_clients:
                raise TooFewClientsError(
                    f"{len(clients)} clients can be asked, but min_clients is "
                    f"{self._settings.min_clients}; nobody was asked",
                    round_number=round_number,
                )
            values = to_numpy(arrays)
            self._codec.layout.check(values)
            self._reference = values if self._settings.payload == "delta" else None
            context = RoundContext(
                run_id=self._run_id,
                round_nonce=os.urandom(NONCE_BYTES),
                server_round=round_number,
                layout=self._codec.layout.digest,
                params=self._settings.digest(),
                model=digest(arrays),
            )
            self._exchange = self._begun(context, clients, grid)
            offer = to_records(self._exchange.offer())[SECAGG]
        if not isinstance(offer, ConfigRecord):
            raise TypeError("an offer has no arrays")
        return offer

    def read(self, reply: Message) -> SealedReply:
        """Read a client's answer, which holds nothing of its update in clear."""
        return SealedReply.from_message(reply)

    def add(self, client: int, answer: SealedReply) -> None:
        """Take a client's share, or its public keys."""
        admitted = self._openings.admitted(self._round)
        if admitted is not None and client not in admitted:
            raise InvalidUpdateError(
                "it was not in the sum of this round that was asked for before the run was "
                "interrupted, and joins again in the next round"
            )
        try:
            self._current.add(answer.content, client)
        except SecureAggregationError as error:
            raise InvalidUpdateError(named(error)) from error
        self._added += 1

    def skip(self, client: int) -> None:
        """Go on without a client: it is not in the sum."""

    def finish(self) -> AggregationResult:
        """Open the sum; no model where no upload came, so that there is none to open."""
        if not self._added:
            return AggregationResult(None)
        exchange = self._current
        try:
            with _giving_up():
                aggregate = exchange.open(self._reference)
        finally:
            self.retried += exchange.retried
        self._exchange = None
        return AggregationResult(
            to_arrays(aggregate.arrays),
            exchange.lost(),
            metrics=aggregate.metrics,
            clipped=aggregate.clipped,
            clipped_metrics=aggregate.clipped_metrics,
        )

    @property
    def _current(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("no round was begun")
        return self._exchange

    def _begun(self, context: RoundContext, clients: Sequence[int], grid: Grid) -> Exchange:
        settings, codec = self._settings, self._codec
        if settings.protocol.startswith("secagg"):
            server = MaskedSum(codec=codec, context=context, settings=settings, clients=clients)
            return MaskedRound(server, Mail(grid, self._clients), before_opening=self._opening)
        leader = Leader(
            codec=codec,
            context=context,
            helpers=sorted(self._helpers),
            clients=clients,
            min_clients=settings.min_clients,
        )
        mail = Mail(grid, self._helpers)
        return SharedRound(
            leader,
            self._greeted(mail),
            mail,
            timeout=settings.combine_timeout_s,
            retries=settings.combine_retries,
            before_opening=self._opening,
        )

    def _opening(self, clients: Iterable[int]) -> None:
        self._openings.about_to_open(self._round, clients)

    def _greeted(self, mail: Mail) -> dict[int, HelloReply]:
        """Return the helpers' keys of this run, which are asked for once."""
        if self._hellos is not None:
            return self._hellos
        hello = Hello(
            run_id=self._run_id,
            params=self._settings.digest(),
            min_clients=self._settings.min_clients,
        )
        hellos: dict[int, HelloReply] = {}
        for helper, reply in mail.insist(
            HELLO,
            dict.fromkeys(self._helpers, hello),
            HelloReply,
            timeout=self._settings.combine_timeout_s,
            retries=self._settings.combine_retries,
            on_retry=self._count,
        ):
            if (reply.helper, reply.run_id) != (helper, self._run_id):
                raise ContextMismatchError(
                    f"helper {helper} answered as helper {reply.helper} of run {reply.run_id!r}"
                )
            hellos[helper] = reply
        self._hellos = hellos
        return hellos

    def _count(self, questions: int) -> None:
        self.retried += questions


@contextmanager
def _giving_up() -> Iterator[None]:
    """Turn the protocol's errors into the end of the round."""
    try:
        yield
    except SecureAggregationError as error:
        raise RoundAbortedError(named(error)) from error

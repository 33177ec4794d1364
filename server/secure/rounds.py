"""One round of secure aggregation over Flower's grid, with queries to clients and helpers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.messages import MASKED, SHARES, UNMASK
from fedsim.protocol.secure import COMBINE, from_records, make_query
from fedsim.protocol.traffic import ClientError, PatientGrid, exchange
from fedsim.secagg.errors import (
    AggregatorUnavailableError,
    ContextMismatchError,
    SecureAggregationError,
)
from fedsim.secagg.messages import (
    CombineReply,
    HelloReply,
    KeysReply,
    MaskedReply,
    RoundOffer,
    SharesReply,
    UnmaskReply,
    Upload,
)
from fedsim.secagg.payload import DecodedSum, NamedArrays
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum

STAGE_TIMEOUT_SECONDS = 600.0  # for the clients' replies in one stage of secagg

_Reply = TypeVar("_Reply")


@dataclass
class QueryChannel:
    """Channel that sends queries to numbered parties over Flower's grid in one round.

    Attributes:
        grid: Flower's grid, which transports the messages.
        nodes: the node id of each party, by the party's number.
        timeout: the longest time to wait for the replies to one attempt, in seconds.
        retries: the number of further attempts for silent parties.
        retried: the number of queries that were sent again.
    """

    grid: Grid
    nodes: Mapping[int, int]
    timeout: float = STAGE_TIMEOUT_SECONDS
    retries: int = 0
    retried: int = 0

    def query(
        self, stage: str, queries: Mapping[int, object], kind: type[_Reply]
    ) -> Iterator[tuple[int, _Reply | SecureAggregationError | ClientError]]:
        """Send a query to each party, and yield each party's number and reply once.

        If a party refused, its reply is replaced by a SecureAggregationError. If it is silent or
        failed without a protocol message, its reply is replaced by a `ClientError`.

        Args:
            stage: the message type of the queries.
            queries: the query to each party, by the party's number.
            kind: the class of the replies.
        """
        messages = {
            number: make_query(stage, query, self.nodes[number])
            for number, query in queries.items()
        }
        for number, answer in exchange(self.grid, messages, timeout=self.timeout):
            if isinstance(answer, ClientError):
                yield number, answer
                continue
            try:
                reply = from_records(kind, answer.content)
            except SecureAggregationError as error:
                yield number, error
            else:
                yield number, reply

    def query_with_retries(
        self, stage: str, queries: Mapping[int, object], kind: type[_Reply]
    ) -> Iterator[tuple[int, _Reply]]:
        """Query each party, ask silent parties again, and yield each party's number and reply.

        Before each further attempt, a party that is offline has `timeout` seconds to come back.

        Args:
            stage: the message type of the queries.
            queries: the query to each party, by the party's number.
            kind: the class of the replies.

        Raises:
            SecureAggregationError: a party refused.
            AggregatorUnavailableError: a party stayed silent in all attempts.
        """
        pending, reasons = dict(queries), dict[int, str]()
        for attempt in range(1 + self.retries):
            if attempt:
                self.retried += len(pending)
                if isinstance(self.grid, PatientGrid):
                    silent_nodes = [self.nodes[number] for number in pending]
                    self.grid.wait_until_online(silent_nodes, timeout=self.timeout)
            for number, reply in self.query(stage, dict(pending), kind):
                if isinstance(reply, SecureAggregationError):
                    raise reply
                if isinstance(reply, ClientError):
                    reasons[number] = reply.reason
                    continue
                del pending[number]
                yield number, reply
            if not pending:
                return
        silent = sorted(pending)
        raise AggregatorUnavailableError(
            f"helpers {silent} did not answer {stage} in {1 + self.retries} attempts "
            f"({reasons[silent[0]]}), and all of them are needed; check that they run, then repeat "
            "the round"
        )


class SecureRound(ABC):
    """Base class of one round of a secure aggregation protocol, as the server runs it.

    Attributes:
        offer: the parameters of the round, which train requests carry.
        record_opening: function that is called with the client set of a secure sum before the sum
            is requested. It may raise SecureAggregationError.
    """

    def __init__(self, offer: RoundOffer, record_opening: Callable[[Iterable[int]], None]) -> None:
        self.offer, self.record_opening = offer, record_opening

    @abstractmethod
    def add(self, content: RecordDict, client: int) -> None:
        """Add the protocol message in a client's train reply.

        Args:
            content: the Flower records of the reply.
            client: the number of the client that sent the reply.

        Raises:
            SecureAggregationError: the message is malformed, or of another round or client.
        """

    @abstractmethod
    def open(self, reference: NamedArrays | None) -> DecodedSum:
        """Run the remaining stages of the protocol and return the decoded sum.

        Args:
            reference: the model to which decoded changes are added; None if clients send models.

        Raises:
            SecureAggregationError: the sum cannot be computed.
        """

    @abstractmethod
    def lost_clients(self) -> Mapping[int, str]:
        """Return the clients that were added but are missing from the sum, each with the reason."""


class AdditiveRound(SecureRound):
    """One round of additive sharing: the server holds one share of each update, helpers the others.

    Args:
        leader: the server's state machine for this round.
        hellos: each helper's reply to the first message of the run, by helper number.
        helpers: the channel to the helpers.
        record_opening: function that is called with the client set before the sum is requested.
    """

    def __init__(
        self,
        leader: Leader,
        hellos: Mapping[int, HelloReply],
        helpers: QueryChannel,
        *,
        record_opening: Callable[[Iterable[int]], None],
    ) -> None:
        super().__init__(leader.offer(hellos), record_opening)
        self._leader, self._helpers = leader, helpers

    def add(self, content: RecordDict, client: int) -> None:
        """Add the server's share of a client's update."""
        upload = from_records(Upload, content)
        _check_sender(upload.client, client)
        self._leader.add(upload)

    def open(self, reference: NamedArrays | None) -> DecodedSum:
        """Ask the helpers for their shares of the sum and return the decoded sum."""
        while not self._leader.is_complete:
            requests = self._leader.requests()
            if any(request.release for request in requests.values()):
                self.record_opening(self._leader.clients)
            replies = self._helpers.query_with_retries(COMBINE, requests, CombineReply)
            for number, reply in replies:
                _check_sender(reply.helper, number, "helper")
                self._leader.take(reply)
        return self._leader.open(reference=reference)

    def lost_clients(self) -> Mapping[int, str]:
        """Return the clients whose share a helper could not decrypt, each with the reason."""
        return self._leader.rejected


class MaskedRound(SecureRound):
    """One round of pairwise masking, with three stages of messages after training.

    A client that is silent or fails in a stage drops out of the following stages. The other clients
    can recover its masks if at least `threshold` of them are left.

    Args:
        server: the server's state machine for this round.
        clients: the channel to the clients.
        record_opening: function that is called with the client set before the sum is requested.
    """

    def __init__(
        self,
        server: MaskedSum,
        clients: QueryChannel,
        *,
        record_opening: Callable[[Iterable[int]], None],
    ) -> None:
        super().__init__(server.offer(), record_opening)
        self._server, self._clients = server, clients
        self._drop_reasons: dict[int, str] = {}
        self._key_senders: list[int] = []

    def add(self, content: RecordDict, client: int) -> None:
        """Store the public keys in a client's train reply."""
        reply = from_records(KeysReply, content)
        _check_sender(reply.client, client)
        self._server.take_keys(reply)
        self._key_senders.append(client)

    def open(self, reference: NamedArrays | None) -> DecodedSum:
        """Collect secret shares, masked updates and unmasking shares; return the decoded sum."""
        server = self._server
        self._run_stage(SHARES, server.rosters(), SharesReply, server.take_shares)
        self._run_stage(MASKED, server.mask_requests(), MaskedReply, server.take_masked)
        requests = server.unmask_requests()
        self.record_opening(server.clients)
        self._run_stage(UNMASK, requests, UnmaskReply, server.take_unmask)
        return server.open(reference=reference)

    def lost_clients(self) -> Mapping[int, str]:
        """Return the clients that sent keys but no masked update, each with the reason."""
        left_out = "the exchange of masks went on without it"
        missing = sorted(set(self._key_senders) - set(self._server.clients))
        return {client: self._drop_reasons.get(client, left_out) for client in missing}

    def _run_stage(
        self,
        stage: str,
        queries: Mapping[int, object],
        kind: type[_Reply],
        take: Callable[[_Reply], None],
    ) -> None:
        for client, reply in self._clients.query(stage, queries, kind):
            try:
                if isinstance(reply, SecureAggregationError):
                    raise reply
                if isinstance(reply, ClientError):
                    self._drop_reasons.setdefault(client, f"{stage}: {reply.reason}")
                    continue
                _check_sender(reply.client, client)  # pyright: ignore[reportAttributeAccessIssue]
                take(reply)
            except SecureAggregationError as error:
                self._drop_reasons.setdefault(client, f"{stage}: {error_text(error)}")


def error_text(error: SecureAggregationError) -> str:
    """Return an error as text `Class: message` (classes: docs/explain/secure_aggregation.md)."""
    return f"{type(error).__name__}: {error}"


def _check_sender(claimed: int, sender: int, role: str = "client") -> None:
    if claimed != sender:
        raise ContextMismatchError(f"{role} {sender} sent the message of {role} {claimed}")

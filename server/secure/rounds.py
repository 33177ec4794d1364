"""The questions of one secure round on a grid: from the first upload to the opened sum."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.secure import COMBINE, MASKED, SHARES, UNMASK, from_records, question
from fedsim.secagg.errors import (
    AggregatorUnavailableError,
    ContextMismatchError,
    SecureAggregationError,
)
from fedsim.secagg.layout import Arrays
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
from fedsim.secagg.payload import Aggregate
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum

STAGE_TIMEOUT = 600.0  # seconds for the clients of a stage of secagg, which only exchange keys

T = TypeVar("T")


@dataclass(frozen=True)
class Mail:
    """Questions to numbered parties over a grid.

    Attributes:
        grid: carries the messages.
        nodes: the node of each party, by the party's number.
    """

    grid: Grid
    nodes: Mapping[int, int]

    def ask(
        self, stage: str, questions: Mapping[int, object], kind: type[T], *, timeout: float
    ) -> Iterator[tuple[int, T | SecureAggregationError]]:
        """Yield each party's answer, or what it refused with; who is silent is left out.

        A node that failed without a word of the protocol is silent, too.
        """
        party = {self.nodes[number]: number for number in questions}
        messages = [question(stage, asked, self.nodes[one]) for one, asked in questions.items()]
        for reply in self.grid.send_and_receive(messages, timeout=timeout):
            number = party.get(reply.metadata.src_node_id)
            if number is None or reply.has_error():
                continue
            try:
                yield number, from_records(kind, reply.content)
            except SecureAggregationError as error:
                yield number, error

    def insist(
        self,
        stage: str,
        questions: Mapping[int, object],
        kind: type[T],
        *,
        timeout: float,
        retries: int,
        on_retry: Callable[[int], None],
    ) -> Iterator[tuple[int, T]]:
        """Yield an answer of every party; ask the silent ones again, up to `retries` times.

        Raises:
            SecureAggregationError: a party refused.
            AggregatorUnavailableError: a party stayed silent.
        """
        pending = dict(questions)
        for attempt in range(1 + retries):
            if attempt:
                on_retry(len(pending))
            for number, reply in self.ask(stage, dict(pending), kind, timeout=timeout):
                if isinstance(reply, SecureAggregationError):
                    raise reply
                del pending[number]
                yield number, reply
            if not pending:
                return
        silent = sorted(pending)
        raise AggregatorUnavailableError(
            f"helpers {silent} did not answer {stage} in {1 + retries} attempts, and all of them "
            "are needed; see that they run, then repeat the round",
            helpers=silent,
        )


class Exchange(ABC):
    """One round: the server's state machine and the questions it asks.

    Attributes:
        retried: questions that were asked again.
        before_opening: called with the clients whose sum is asked for next; may raise
            SecureAggregationError.
    """

    retried: int = 0

    def __init__(self, before_opening: Callable[[Iterable[int]], None]) -> None:
        self.before_opening = before_opening

    @abstractmethod
    def offer(self) -> RoundOffer:
        """Return what clients need to know."""

    @abstractmethod
    def add(self, content: RecordDict, client: int) -> None:
        """Take what a client sent with its train reply.

        Raises:
            SecureAggregationError: it is malformed, of another round, or another client's.
        """

    @abstractmethod
    def open(self, reference: Arrays | None) -> Aggregate:
        """Ask what there is to ask and return the aggregate.

        Raises:
            SecureAggregationError: the sum cannot be opened.
        """

    @abstractmethod
    def lost(self) -> Mapping[int, str]:
        """Return clients that were added and are not in the sum, and why."""


class SharedRound(Exchange):
    """Additive shares: the leader here, the helpers on nodes of their own.

    Args:
        leader: this round's.
        hellos: what the helpers said of themselves.
        helpers: carries questions to helpers.
        timeout: seconds for an answer of a helper.
        retries: how often a silent helper is asked again.
        before_opening: see `Exchange`.
    """

    def __init__(
        self,
        leader: Leader,
        hellos: Mapping[int, HelloReply],
        helpers: Mail,
        *,
        timeout: float,
        retries: int,
        before_opening: Callable[[Iterable[int]], None],
    ) -> None:
        super().__init__(before_opening)
        self._leader, self._hellos, self._helpers = leader, hellos, helpers
        self._timeout, self._retries = timeout, retries

    def offer(self) -> RoundOffer:
        """Return what clients need to know."""
        return self._leader.offer(self._hellos)

    def add(self, content: RecordDict, client: int) -> None:
        """Add the leader's share of a client."""
        upload = from_records(Upload, content)
        _check_sender(upload.client, client)
        self._leader.add(upload)

    def open(self, reference: Arrays | None) -> Aggregate:
        """Combine with the helpers and open the sum."""
        while not self._leader.complete:
            asked = self._leader.requests()
            if any(request.release for request in asked.values()):
                self.before_opening(self._leader.clients)
            for _, reply in self._helpers.insist(
                COMBINE,
                asked,
                CombineReply,
                timeout=self._timeout,
                retries=self._retries,
                on_retry=self._count,
            ):
                self._leader.take(reply)
        return self._leader.open(reference=reference)

    def lost(self) -> Mapping[int, str]:
        """Return the clients whose envelopes a helper could not open."""
        return self._leader.rejected

    def _count(self, questions: int) -> None:
        self.retried += questions


class MaskedRound(Exchange):
    """Pairwise masks: three more stages with the clients that sent their keys.

    A client that is silent or fails in a stage drops out of the following ones; what is lost with
    it is recovered by the others, down to the threshold.
    """

    def __init__(
        self, server: MaskedSum, clients: Mail, *, before_opening: Callable[[Iterable[int]], None]
    ) -> None:
        super().__init__(before_opening)
        self._server, self._clients = server, clients
        self._reasons: dict[int, str] = {}
        self._keyed: list[int] = []

    def offer(self) -> RoundOffer:
        """Return what clients need to know."""
        return self._server.offer()

    def add(self, content: RecordDict, client: int) -> None:
        """Take a client's public keys."""
        reply = from_records(KeysReply, content)
        _check_sender(reply.client, client)
        self._server.take_keys(reply)
        self._keyed.append(client)

    def open(self, reference: Arrays | None) -> Aggregate:
        """Exchange shares, masked payloads and what unmasks them."""
        server = self._server
        self._stage(SHARES, server.rosters(), SharesReply, server.take_shares)
        self._stage(MASKED, server.mask_requests(), MaskedReply, server.take_masked)
        requests = server.unmask_requests()
        self.before_opening(server.clients)
        self._stage(UNMASK, requests, UnmaskReply, server.take_unmask)
        return server.open(reference=reference)

    def lost(self) -> Mapping[int, str]:
        """Return the clients whose masked payload did not come."""
        silent = "no reply in the exchange of masks"
        missing = sorted(set(self._keyed) - set(self._server.clients))
        return {client: self._reasons.get(client, silent) for client in missing}

    def _stage(
        self,
        stage: str,
        questions: Mapping[int, object],
        kind: type[T],
        take: Callable[[T], None],
    ) -> None:
        for client, reply in self._clients.ask(stage, questions, kind, timeout=STAGE_TIMEOUT):
            try:
                if isinstance(reply, SecureAggregationError):
                    raise reply
                _check_sender(reply.client, client)  # pyright: ignore[reportAttributeAccessIssue]
                take(reply)
            except SecureAggregationError as error:
                self._reasons.setdefault(client, f"{stage}: {named(error)}")


def named(error: SecureAggregationError) -> str:
    """Return an error with the name of its class, by which the fault table lists it."""
    return f"{type(error).__name__}: {error}"


def _check_sender(said: int, sender: int) -> None:
    if said != sender:
        raise ContextMismatchError(f"it sent the message of client {said}", client=sender)

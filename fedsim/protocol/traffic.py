"""Requests to clients and their answers, over any Flower grid or by direct calls, and their bytes.

A reply may come from another sender than the node that was asked: Flower's SuperLink answers in its
own name for a node that died. So replies are matched to requests by the request's id. On a grid
that sets no message ids, they are matched by the sender. The server sends and receives dataclasses.
They are converted to Flower's records only if a message leaves the process or reaches a user's
Flower app.

The count of bytes is the same whether messages are serialized or not. It covers the values of
arrays and the bytes of encrypted fields. It leaves out names, types, the framing of messages,
records of a few numbers, and messages to helpers of secure aggregation.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class ClientError:
    """Answer in place of a reply, if a client or helper node failed or sent no valid reply.

    Attributes:
        reason: text that says why the client or helper node failed.
        code: error code of Flower, or a code of `protocol.errors`.
    """

    reason: str
    code: int = 0


NO_REPLY = ClientError("no reply")


@runtime_checkable
class PatientGrid(Protocol):
    """A Flower grid whose nodes may come back after a failure, such as a restarted SuperNode."""

    def wait_until_online(self, nodes: Collection[int], *, timeout: float) -> None:
        """Wait until all nodes are online, or until the timeout.

        Args:
            nodes: the ids of the nodes.
            timeout: the longest time to wait, in seconds.
        """
        ...


def exchange(
    grid: Grid, requests: Mapping[_Key, Message], *, timeout: float | None
) -> Iterator[tuple[_Key, Message | ClientError]]:
    """Send requests and yield each request's key and answer as answers arrive.

    Guarantee: each key is yielded once, with a reply or with a `ClientError`. The reply has content
    and comes from the node that was asked. The error comes from the node or from the SuperLink.
    Requests that have no answer at the end yield `NO_REPLY`. Other replies are logged and ignored:
    replies from unknown nodes, to other requests, and second replies.

    Args:
        grid: the grid that reaches the nodes.
        requests: the request to each node, by a key that the caller chooses.
        timeout: the longest time to wait for all replies, in seconds; None for no limit.
    """
    if not requests:
        return
    unanswered = dict(requests)
    by_node = {request.metadata.dst_node_id: key for key, request in requests.items()}
    by_id: dict[str, _Key] | None = None
    for reply in grid.send_and_receive(list(requests.values()), timeout=timeout):
        if by_id is None:  # the grid sets the ids when it sends
            by_id = {request.metadata.message_id: key for key, request in requests.items()}
        source, answered = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        has_ids = "" not in by_id
        key = by_id.get(answered) if has_ids else by_node.get(source)
        if key is None or not (reply.has_error() or source == requests[key].metadata.dst_node_id):
            logger.warning("a reply of node %d answers no request and is left out", source)
        elif unanswered.pop(key, None) is None:
            logger.warning("a second reply of node %d is left out", source)
        elif reply.has_error():
            yield key, ClientError(reply.error.reason or "no reason given", reply.error.code)
        else:
            yield key, reply
    for key in unanswered:
        yield key, NO_REPLY


TrainAnswer = TrainReply | SealedReply | Withdrawal | ClientError


class ClientChannel(Protocol):
    """A way to send train requests to clients and to receive their answers."""

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield the node id and the answer of each client once, as answers arrive.

        Args:
            requests: the request to each node, by node id, in ascending order of client numbers.
            timeout: the longest time to wait for all answers, in seconds; None for no limit.
        """
        ...


@runtime_checkable
class DirectGrid(Protocol):
    """A Flower grid whose clients run in this process and can be called without messages."""

    def direct_channel(self) -> ClientChannel | None:
        """Return a channel of direct calls to clients; None if the app must receive messages."""
        ...


@dataclass(frozen=True)
class MessageChannel:
    """A channel that sends train requests to clients as Flower messages.

    Attributes:
        grid: the grid that reaches the nodes.
        reply_type: the class of the replies, which is `TrainReply`, or `SealedReply` under secure
            aggregation.
    """

    grid: Grid
    reply_type: type[TrainReply] | type[SealedReply]

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield the node id and the answer of each client once, as answers arrive."""
        messages = {node: request.to_message(node) for node, request in requests.items()}
        for node, reply in exchange(self.grid, messages, timeout=timeout):
            yield node, self._read(reply)

    def _read(self, reply: Message | ClientError) -> TrainAnswer:
        if isinstance(reply, ClientError):
            return reply
        try:
            return Withdrawal.from_message(reply) or self.reply_type.from_message(reply)
        except ProtocolError as error:
            return ClientError(str(error))


def client_channel(grid: Grid, reply_type: type[TrainReply] | type[SealedReply]) -> ClientChannel:
    """Return the channel to the clients of a grid: direct calls if possible, otherwise messages.

    Args:
        grid: the grid that reaches the nodes.
        reply_type: the class of the replies in messages.
    """
    direct = grid.direct_channel() if isinstance(grid, DirectGrid) else None
    return direct or MessageChannel(grid, reply_type)


class WrappedGrid(Grid):
    """Base class of Flower grids that wrap another grid and forward all calls to it.

    Args:
        grid: the grid that receives the calls.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Any) -> None:
        """Replace Flower's description of the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Flower's description of the run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message; Flower keeps this method for old apps."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes that are online."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived to the messages with the given ids."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the reply to each message.

        Args:
            messages: the requests.
            timeout: the longest time to wait for all replies, in seconds; None for no limit.
        """
        return self._grid.send_and_receive(messages, timeout=timeout)

    def wait_until_online(self, nodes: Collection[int], *, timeout: float) -> None:
        """Wait until all nodes are online; return at once if the wrapped grid cannot wait.

        Args:
            nodes: the ids of the nodes.
            timeout: the longest time to wait, in seconds.
        """
        if isinstance(self._grid, PatientGrid):
            self._grid.wait_until_online(nodes, timeout=timeout)


@dataclass
class Traffic:
    """Counter of the bytes between the server and the clients in one round.

    Attributes:
        down: number of bytes from the server to clients.
        up: number of bytes from clients to the server.
    """

    down: int = 0
    up: int = 0

    def send(self, requests: Mapping[int, TrainRequest]) -> None:
        """Add the bytes of the server's train requests to `down`.

        Args:
            requests: the request to each node, by node id.
        """
        sizes: dict[int, int] = {}  # all requests share one model
        for request in requests.values():
            key = id(request.arrays)
            if key not in sizes:
                sizes[key] = _array_bytes(request.arrays)
            self.down += sizes[key]
            self.down += 0 if request.offer is None else _field_bytes(request.offer)
            self.down += sum(map(_array_bytes, request.sent.values()))

    def receive(self, answer: TrainAnswer) -> None:
        """Add the bytes of a client's answer to `up`; a failure or a withdrawal adds none."""
        if isinstance(answer, TrainReply):
            self.up += sum([array.nbytes for array in answer.arrays.values()])
        elif isinstance(answer, SealedReply):
            self.up += _content_bytes(answer.content)


class CountedGrid(WrappedGrid):
    """A Flower grid that counts the bytes of messages to and from clients.

    Args:
        grid: the grid that receives the calls.
        traffic: the counter to which the bytes are added.
        clients: the node ids of the clients.
    """

    def __init__(self, grid: Grid, traffic: Traffic, clients: Collection[int]) -> None:
        super().__init__(grid)
        self._traffic, self._clients = traffic, clients

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the reply to each message.

        Args:
            messages: the requests.
            timeout: the longest time to wait for all replies, in seconds; None for no limit.
        """
        requests = list(messages)
        for request in requests:
            if request.metadata.dst_node_id in self._clients:
                self._traffic.down += _content_bytes(request.content)
        for reply in self._grid.send_and_receive(requests, timeout=timeout):
            if reply.metadata.src_node_id in self._clients and not reply.has_error():
                self._traffic.up += _content_bytes(reply.content)
            yield reply


def _content_bytes(content: RecordDict) -> int:
    arrays = sum(_array_bytes(record) for record in content.array_records.values())
    return arrays + sum(_field_bytes(record) for record in content.config_records.values())


def _array_bytes(arrays: ArrayRecord) -> int:
    return sum(math.prod(array.shape) * _item_bytes(array.dtype) for array in arrays.values())


def _item_bytes(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # of a reply that is refused where it is read
        return 0


def _field_bytes(fields: ConfigRecord) -> int:
    total = 0
    for value in fields.values():
        parts = value if isinstance(value, list) else [value]
        total += sum(len(part) for part in parts if isinstance(part, bytes))
    return total

"""Requests to clients and their answers, over any Flower grid or by direct calls.

A reply may come from another sender than the node that was asked: Flower's SuperLink answers in its
own name for a node that died. So replies are matched to requests by the request's id. On a grid
that sets no message ids, they are matched by the sender.

The server sends and receives dataclasses. They are converted to Flower's records only if a message
leaves the process or reaches a user's Flower app.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from flwr.app import Message
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

"""Train requests to clients, and their answers: over any Flower grid, or without messages.

The server sends and receives dataclasses. Flower's records are made where a message leaves the
process or meets a Flower app of the user.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.exchange import ClientError, exchange
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal

TrainAnswer = TrainReply | SealedReply | Withdrawal | ClientError


class ClientChannel(Protocol):
    """Sends train requests to clients."""

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield node and answer of each client, once, as soon as it exists.

        Args:
            requests: one for each node, by node id, in ascending order of clients.
            timeout: seconds for all answers; None: no limit.
        """
        ...


@runtime_checkable
class DirectGrid(Protocol):
    """A grid whose clients are in this process, and may be asked without messages."""

    def direct_channel(self) -> ClientChannel | None:
        """Return the channel to the clients; None where their app must see messages."""
        ...


@dataclass(frozen=True)
class MessageChannel:
    """Train requests as Flower messages.

    Attributes:
        grid: reaches the nodes.
        reply_type: `TrainReply`, or `SealedReply` under secure aggregation.
    """

    grid: Grid
    reply_type: type[TrainReply] | type[SealedReply]

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield node and answer of each client (see `ClientChannel`)."""
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
    """Return the shortest way to the clients of a grid.

    Args:
        grid: reaches the nodes.
        reply_type: type of the replies to read from messages.
    """
    direct = grid.direct_channel() if isinstance(grid, DirectGrid) else None
    return direct or MessageChannel(grid, reply_type)

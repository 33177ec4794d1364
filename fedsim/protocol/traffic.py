"""Counters of the bytes that clients receive and send in a round.

The count is the same whether messages are serialized or not. It covers the values of arrays and the
bytes of encrypted fields. It leaves out names, types, the framing of messages, records of a few
numbers, and messages to helpers of secure aggregation.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.channel import PatientGrid, TrainAnswer
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest


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
            self.up += _array_bytes(answer.arrays)
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

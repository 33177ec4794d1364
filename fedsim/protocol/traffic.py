"""Bytes that clients receive and send in a round, the same with and without serialization.

Counted are the values of arrays and the bytes of sealed fields; names, types, frames and records of
a few numbers are not. A request to a helper of secure aggregation is no traffic of a client.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.channel import TrainAnswer
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest
from fedsim.protocol.wrapped_grid import WrappedGrid


@dataclass
class Traffic:
    """Bytes of one round.

    Attributes:
        down: from the server to clients.
        up: from clients to the server.
    """

    down: int = 0
    up: int = 0

    def send(self, requests: Mapping[int, TrainRequest]) -> None:
        """Count train requests.

        Args:
            requests: one for each node.
        """
        sizes: dict[int, int] = {}  # all requests share one model
        for request in requests.values():
            model = sizes.setdefault(id(request.arrays), _array_bytes(request.arrays))
            self.down += model + (0 if request.offer is None else _field_bytes(request.offer))
            self.down += sum(map(_array_bytes, request.sent.values()))

    def receive(self, answer: TrainAnswer) -> None:
        """Count the answer to a train request; a failure or a withdrawal has no bytes."""
        if isinstance(answer, TrainReply):
            self.up += _array_bytes(answer.arrays)
        elif isinstance(answer, SealedReply):
            self.up += _content_bytes(answer.content)


class CountedGrid(WrappedGrid):
    """Counts the messages of clients.

    Args:
        grid: reaches the nodes.
        traffic: is added to.
        clients: node ids of the clients.
    """

    def __init__(self, grid: Grid, traffic: Traffic, clients: Collection[int]) -> None:
        super().__init__(grid)
        self._traffic, self._clients = traffic, clients

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message.

        Args:
            messages: the requests.
            timeout: seconds for all replies; None: no limit.
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
    return sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in arrays.values())


def _field_bytes(fields: ConfigRecord) -> int:
    found = 0
    for value in fields.values():
        parts = value if isinstance(value, list) else [value]
        found += sum(len(part) for part in parts if isinstance(part, bytes))
    return found

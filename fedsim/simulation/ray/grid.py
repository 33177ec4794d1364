"""Flower's `Grid` over Ray actors: a client stays in one process with its data and state.

This grid behaves as the local grid does, but replies come in the order in which they finish.
Records that several messages share, such as the global model, are put into Ray's object store once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from flwr.app import ArrayRecord, Message, RecordDict

from fedsim.protocol.flower_internals import replace_content
from fedsim.simulation.engine import FIRST_NODE, VirtualGrid
from fedsim.simulation.ray.host import PackedRequest
from fedsim.simulation.ray.pool import WorkerPool


class RayGrid(VirtualGrid):
    """Flower grid whose nodes are in the worker processes of a pool.

    With each reply of a client, the grid gets a copy of that client's context.

    Args:
        pool: the pool of workers, to which messages are sent.
        num_clients: the number of nodes.
        first_of_block: function that maps a client and a message to the first client of the group
            (block) with which this client answers this message.
        is_federation: whether the nodes are the clients of a fedsim federation in order, followed
            by the helpers of secure aggregation.
    """

    def __init__(
        self,
        pool: WorkerPool,
        num_clients: int,
        *,
        first_of_block: Callable[[int, Message], int],
        is_federation: bool = False,
    ) -> None:
        super().__init__(num_clients)
        self._is_federation = is_federation
        self._first_of_block = first_of_block
        self._pool = pool

    def numbered_nodes(self) -> Sequence[int] | None:
        """Return the ids of all nodes, in the order of their numbers.

        The result is None if the nodes do not belong to a fedsim federation.
        """
        return self.node_range if self._is_federation else None

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the reply to each message as replies arrive.

        If a client's worker died repeatedly while it handled the message, the reply is an error.

        Args:
            messages: the requests.
            timeout: the longest time to wait for all replies, in seconds; None for no limit.
                Clients that are silent until then are left out.
        """
        sent = list(messages)
        for message in sent:
            self._set_id(message)
        requests, shared = _pack_requests(sent)
        blocks = [
            self._first_of_block(message.metadata.dst_node_id - FIRST_NODE, message)
            for message in sent
        ]
        for reply in self._pool.send_and_receive(
            zip(requests, blocks, strict=True), shared, timeout=timeout
        ):
            self._set_id(reply)
            yield reply


def _pack_requests(messages: list[Message]) -> tuple[list[PackedRequest], dict[str, Any]]:
    """Pack requests; return them, and Ray references to the records that they share, by key."""
    uses = Counter(id(record) for message in messages for record in _arrays(message))
    common: dict[int, str] = {}
    shared: dict[str, Any] = {}
    for message in messages:
        for record in _arrays(message):
            if uses[id(record)] > 1 and id(record) not in common:
                reference = ray.put(record)
                common[id(record)] = reference.hex()
                shared[reference.hex()] = reference
    requests = [
        PackedRequest(
            envelope=replace_content(message, RecordDict()),
            records={
                name: None if id(record) in common else record
                for name, record in message.content.items()
            },
            shared={
                name: common[id(record)]
                for name, record in message.content.items()
                if id(record) in common
            },
        )
        for message in messages
    ]
    return requests, shared


def _arrays(message: Message) -> Iterable[ArrayRecord]:
    return (record for record in message.content.values() if isinstance(record, ArrayRecord))

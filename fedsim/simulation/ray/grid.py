"""Flower's `Grid` over sticky Ray actors: a client stays in one process with its data and state.

Semantics are those of the local grid, except that replies come in the order in which they are done.
Records that messages of one round have in common, above all the global model, are put into the
object store once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import ray
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedsim.simulation.flower_internals import with_content
from fedsim.simulation.ray.host import Parcel
from fedsim.simulation.ray.pool import WorkerPool
from fedsim.simulation.virtual_grid import FIRST_NODE, VirtualGrid


class RayGrid(VirtualGrid):
    """A grid whose nodes live in the workers of a pool.

    The contexts here are the recorded ones: as each client had it when it last answered.
    """

    def __init__(self, num_clients: int, *, run_id: int) -> None:
        super().__init__(num_clients, run_id=run_id)
        self._pool = WorkerPool((), patience=0.0)

    def contexts(self, clients: Iterable[int]) -> list[Context]:
        """Return the recorded contexts of some clients."""
        return [self._contexts[FIRST_NODE + client] for client in clients]

    def employ(self, pool: WorkerPool) -> None:
        """Have messages answered by these workers from now on."""
        self._pool = pool

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message as soon as it exists.

        A client whose worker died again and again over its message is answered for with an error.
        After `timeout` seconds, clients that did not answer are left out.
        """
        asked = list(messages)
        for message in asked:
            self._stamp(message)
        parcels, shared = _pack(asked)
        for reply in self._pool.answers(parcels, shared, timeout=timeout):
            self._stamp(reply)
            yield reply


def _pack(messages: list[Message]) -> tuple[list[Parcel], dict[str, Any]]:
    """Divide messages into what is their own and what they share, as references by key."""
    uses = Counter(id(record) for message in messages for record in _arrays(message))
    common: dict[int, str] = {}
    shared: dict[str, Any] = {}
    for message in messages:
        for record in _arrays(message):
            if uses[id(record)] > 1 and id(record) not in common:
                reference = ray.put(record)
                common[id(record)] = reference.hex()
                shared[reference.hex()] = reference
    parcels = [
        Parcel(
            envelope=with_content(message, RecordDict()),
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
    return parcels, shared


def _arrays(message: Message) -> Iterable[ArrayRecord]:
    return (record for record in message.content.values() if isinstance(record, ArrayRecord))

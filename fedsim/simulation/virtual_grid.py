"""What every simulated `Grid` has in common: its nodes, and messages that wait to be pulled."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from fedsim.simulation.flower_internals import CLIENT_RAISED, empty_run, stamp

FIRST_NODE = 1000

Record = ArrayRecord | MetricRecord | ConfigRecord


class VirtualGrid(Grid):
    """A grid of `num_clients` nodes, `FIRST_NODE + partition`, each with a `Context` of its own.

    A subclass says how messages are answered: `send_and_receive`.
    """

    def __init__(self, num_clients: int, *, run_id: int) -> None:
        self._run = empty_run(run_id)
        self._contexts = {
            FIRST_NODE + partition: Context(
                run_id=run_id,
                node_id=FIRST_NODE + partition,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for partition in range(num_clients)
        }
        self._ids = count(1)
        self._pushed: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Replace the description of the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """The description of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message (kept by Flower for old apps)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes in the order of their partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages and return their ids; they are answered when they are pulled."""
        ids = []
        for message in messages:
            self._stamp(message)
            self._pushed[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the given messages; an id that was pulled before has none."""
        known = [self._pushed.pop(name) for name in message_ids if name in self._pushed]
        return list(self.send_and_receive(known))

    @abstractmethod
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message as soon as it exists."""

    def _stamp(self, message: Message) -> None:
        """Give a message an id, unless it has one."""
        if not message.metadata.message_id:
            stamp(message, str(next(self._ids)))


def failure(request: Message, reason: str) -> Message:
    """Return the reply of a client that failed."""
    return Message(Error(CLIENT_RAISED, reason), reply_to=request)

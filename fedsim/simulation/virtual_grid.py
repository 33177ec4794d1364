"""Base of the simulated grids: nodes with their contexts, and pushed messages."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.flower_internals import CLIENT_RAISED, empty_run, set_message_id
from fedsim.simulation.node_contexts import FIRST_NODE as FIRST_NODE
from fedsim.simulation.node_contexts import NodeContexts

FlowerRecord = ArrayRecord | MetricRecord | ConfigRecord


class VirtualGrid(Grid):
    """A grid of `num_clients` nodes, `FIRST_NODE + partition`, each with its own `Context`.

    A subclass implements `send_and_receive`.

    Args:
        num_clients: number of nodes.
        run_id: Flower's id of the run.
    """

    def __init__(self, num_clients: int, *, run_id: int) -> None:
        self._run = empty_run(run_id)
        self._contexts = NodeContexts(range(num_clients), num_nodes=num_clients, run_id=run_id)
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
        """Return a message; Flower keeps this method for old apps."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @property
    def node_range(self) -> range:
        """The ids of all nodes, in the order of their partitions."""
        return range(FIRST_NODE, FIRST_NODE + len(self._contexts))

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes in the order of their partitions."""
        return list(self.node_range)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; they are answered when they are pulled."""
        ids = []
        for message in messages:
            self._set_id(message)
            self._pushed[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the given messages; a second pull of an id gives no reply."""
        known = [self._pushed.pop(name) for name in message_ids if name in self._pushed]
        return list(self.send_and_receive(known))

    @abstractmethod
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message as soon as it exists.

        Args:
            messages: the requests.
            timeout: seconds for all replies; None: no limit.
        """

    def _set_id(self, message: Message) -> None:
        """Set the id of a message that has none."""
        if not message.metadata.message_id:
            set_message_id(message, str(next(self._ids)))


def failure(request: Message, reason: str) -> Message:
    """Return the reply of a failed client.

    Args:
        request: the message to the client.
        reason: text of the failure.
    """
    return Message(Error(CLIENT_RAISED, reason), reply_to=request)

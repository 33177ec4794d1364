"""A grid around another grid, to change how messages are sent and received."""

from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.exchange import PatientGrid


class WrappedGrid(Grid):
    """Passes everything on; a subclass changes what it is for.

    Args:
        grid: reaches the nodes.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Any) -> None:
        """Replace the description of the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The description of the run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message; Flower keeps this method for old apps."""
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
        """Return the replies that have arrived."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the reply to each message.

        Args:
            messages: the requests.
            timeout: seconds for all replies; None: no limit.
        """
        return self._grid.send_and_receive(messages, timeout=timeout)

    def wait_until_online(self, nodes: Collection[int], *, timeout: float) -> None:
        """Return when all nodes are online, or at once where the grid cannot wait.

        Args:
            nodes: node ids.
            timeout: seconds.
        """
        if isinstance(self._grid, PatientGrid):
            self._grid.wait_until_online(nodes, timeout=timeout)

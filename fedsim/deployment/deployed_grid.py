"""The grid of a deployment, which notices that a SuperNode was restarted during a request.

A SuperNode that is killed takes the requests that it had with it. Flower's SuperLink answers for it
with an error while it is offline. If it is back between two looks, nobody ever answers.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.errors import NODE_RESTARTED

_POLL_SECONDS = 1.0


class DeployedGrid(Grid):
    """Flower's grid with an answer to each request to a node that was restarted since.

    Guarantee: a request is answered by its node, by the SuperLink, or by an error of code
    `NODE_RESTARTED` as soon as its node has been activated again. Without such an error a round
    waits for the message to expire, 12 hours.

    Args:
        grid: of Flower's ServerApp.
        pause: waits between two looks for replies.
        clock: seconds, for timeouts.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        pause: Callable[[], None] = lambda: time.sleep(_POLL_SECONDS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._pause, self._clock = grid, pause, clock

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
    ) -> Iterator[Message]:
        """Yield the reply to each message, or the error in its place.

        Args:
            messages: the requests.
            timeout: seconds for all replies; None: no limit.
        """
        deadline = None if timeout is None else self._clock() + timeout
        sent, before = list(messages), self._activations()
        ids: Sequence[str | None] = list(self.push_messages(sent))
        waiting = {name: message for name, message in zip(ids, sent, strict=False) if name}
        while waiting and (deadline is None or self._clock() < deadline):
            now = self._activations()  # before the pull: a reply from before a restart counts
            for reply in self.pull_messages(list(waiting)):
                waiting.pop(reply.metadata.reply_to_message_id, None)
                yield reply
            for name, message in list(waiting.items()):
                node = message.metadata.dst_node_id
                if node in now and now[node] != before.get(node, now[node]):
                    del waiting[name]
                    error = Error(NODE_RESTARTED, "its SuperNode was restarted during the request")
                    yield Message(error, reply_to=message)
            if waiting:
                self._pause()

    def wait_until_online(self, nodes: Collection[int], *, timeout: float) -> None:
        """Return when all nodes are online, or after the timeout.

        Args:
            nodes: node ids.
            timeout: seconds.
        """
        deadline = self._clock() + timeout
        while not set(nodes) <= set(self.get_node_ids()) and self._clock() < deadline:
            self._pause()

    def _activations(self) -> dict[int, str]:
        """Return when each node that is online became so."""
        return {node.node_id: node.last_activated_at for node in self.get_nodes()}

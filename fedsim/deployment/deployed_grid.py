"""The grid of a deployment, which notices that a SuperNode was restarted during a request.

A SuperNode that is killed takes the requests that it had with it. Flower's SuperLink answers for it
with an error while it is offline. If it is back between two looks, nobody ever answers.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedsim.protocol.errors import NODE_RESTARTED
from fedsim.protocol.wrapped_grid import WrappedGrid

_POLL_SECONDS = 1.0


class DeployedGrid(WrappedGrid):
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
        super().__init__(grid)
        self._pause, self._clock = pause, clock

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

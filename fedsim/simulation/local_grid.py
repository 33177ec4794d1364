"""Flower's `Grid` in one process: a message is a function call.

Unchanged ServerApps, Strategies and ClientApps run on it without Ray and without serialization.
Where server and clients are fedsim's own and the app has no mods, train requests need no messages
either (`direct_channel`).

Where Flower leaves the semantics open:

- Node ids are `FIRST_NODE + partition`, in ascending order.
- Replies come lazily, one at a time, in the order of the requests: a strategy that consumes them as
  a stream holds one at a time. `push_messages` followed by `pull_messages` works as well.
- Each client gets its own records; their arrays are shared and read-only.
- An app that answers many requests at once (`BatchAnswers`) gets all requests of one kind when the
  first reply is read. An app with Flower mods is called with each message.
- A client's `Context` keeps what the client wrote before an exception, so a recorded charge is
  never lost.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.protocol.flower_internals import replace_content
from fedsim.simulation.direct_channel import (
    DirectAnswers,
    DirectChannel,
    LiveArrayCache,
    failure_reason,
)
from fedsim.simulation.virtual_grid import FIRST_NODE as FIRST_NODE
from fedsim.simulation.virtual_grid import VirtualGrid, answer_requests, failure


class LocalGrid(VirtualGrid):
    """A grid of virtual nodes in this process, each with a persistent `Context`.

    Args:
        client_app: the app of every node.
        num_clients: number of nodes.
        run_id: Flower's id of the run.
    """

    def __init__(self, client_app: ClientApp, num_clients: int, *, run_id: int = 1) -> None:
        super().__init__(num_clients, run_id=run_id)
        self._client_app = client_app

    def direct_channel(self) -> DirectChannel | None:
        """Return the channel that asks clients without messages.

        None for an app that is not fedsim's, that has mods, or where a subclass of the grid sees
        messages.
        """
        app = self._client_app
        if isinstance(app, DirectAnswers) and self._needs_no_messages:
            return DirectChannel(app, self._contexts)
        return None

    def numbered_nodes(self) -> Sequence[int] | None:
        """Return all nodes by number; None for an app that sees, or may answer, the roll call."""
        return self.node_range if self._needs_no_messages else None

    @property
    def _needs_no_messages(self) -> bool:
        app, watched = self._client_app, type(self).send_and_receive is not _SEND_AND_RECEIVE
        return isinstance(app, DirectAnswers) and app.takes_batches and not watched

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message, in the order of the messages.

        Args:
            messages: the requests.
            timeout: ignored: it cannot interrupt a client of the same process.
        """
        live = LiveArrayCache()
        for _, same_kind in groupby(messages, key=lambda message: message.metadata.message_type):
            group = list(same_kind)
            for message in group:
                self._set_id(message)
            requests = [
                (_private_copy(message, live), self._contexts[message.metadata.dst_node_id])
                for message in group
            ]
            answers = chain.from_iterable(answer_requests(self._client_app, requests))
            for message, answer in zip(group, answers, strict=True):
                yield self._reply(message, answer)

    def _reply(self, message: Message, answer: Message | Exception) -> Message:
        if isinstance(answer, Exception):
            answer = failure(message, failure_reason(message.metadata.dst_node_id, answer))
        self._set_id(answer)
        return answer


_SEND_AND_RECEIVE = LocalGrid.send_and_receive


def _private_copy(message: Message, live: LiveArrayCache) -> Message:
    """Return the message with its own records; strategies share one RecordDict among messages."""
    records = {
        name: live.of(record).copy() if isinstance(record, ArrayRecord) else record.copy()
        for name, record in message.content.items()
    }
    return replace_content(message, RecordDict(records))

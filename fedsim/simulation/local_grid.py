"""Flower's `Grid` in one process: a message is a function call.

Unchanged ServerApps, Strategies and ClientApps run on it without Ray and without serialization.

Semantics, where Flower's own simulation leaves a choice:

- Nodes are `FIRST_NODE + partition`, in a stable order.
- Replies come lazily, one at a time, in the order of the requests: a strategy that consumes them as
  a stream never holds more than one. `push_messages` followed by `pull_messages` works as well.
- Each client gets records of its own; they share the arrays' numbers, which cannot be written to.
- An app that can answer many requests at once (`BatchAnswers`) gets them in groups, a group when
  its first reply is read.
- A client's `Context` keeps what it wrote before an exception. For a privacy account that is the
  safe side.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain

from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fedsim.clients.batch_app import BatchAnswers
from fedsim.protocol.live_arrays import live_record
from fedsim.protocol.records import record_dict
from fedsim.simulation.answers import answers_of
from fedsim.simulation.flower_internals import with_content
from fedsim.simulation.virtual_grid import FIRST_NODE as FIRST_NODE
from fedsim.simulation.virtual_grid import VirtualGrid, failure

logger = logging.getLogger(__name__)


class LocalGrid(VirtualGrid):
    """A grid of `num_clients` virtual nodes, each with a persistent `Context`."""

    def __init__(self, client_app: ClientApp, num_clients: int, *, run_id: int = 1) -> None:
        super().__init__(num_clients, run_id=run_id)
        self._client_app = client_app

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message as soon as it exists.

        A timeout cannot interrupt a client of the same process and is ignored.
        """
        live = _LiveArrays()
        for group in self._groups(messages):
            for message in group:
                self._stamp(message)
            requests = [
                (_private_copy(message, live), self._contexts[message.metadata.dst_node_id])
                for message in group
            ]
            answers = chain.from_iterable(answers_of(self._client_app, requests))
            for message, answer in zip(group, answers, strict=True):
                yield self._reply(message, answer)

    def _groups(self, messages: Iterable[Message]) -> Iterator[list[Message]]:
        """Cut the requests into groups of one kind that the app takes at once."""
        app = self._client_app
        most = app.group_size if isinstance(app, BatchAnswers) else 1
        group: list[Message] = []
        for message in messages:
            full = len(group) >= most
            if group and (full or message.metadata.message_type != group[0].metadata.message_type):
                yield group
                group = []
            group.append(message)
        if group:
            yield group

    def _reply(self, message: Message, answer: Message | Exception) -> Message:
        if isinstance(answer, Exception):
            node_id = message.metadata.dst_node_id
            logger.debug("node %d raised", node_id, exc_info=answer)
            answer = failure(message, f"{type(answer).__name__}: {answer}")
        self._stamp(answer)
        return answer


class _LiveArrays:
    """Unpacks the arrays that many messages share once, for as long as they are sent."""

    def __init__(self) -> None:
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None

    def of(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record of its own with the same arrays, which nobody can change."""
        if self._last is None or self._last[0] is not record:
            values = {name: array.numpy() for name, array in record.items()}
            self._last = record, live_record(values)
        return self._last[1].copy()


def _private_copy(message: Message, live: _LiveArrays) -> Message:
    """Return the message with records of its own: strategies share one RecordDict among all."""
    records = {
        name: live.of(record) if isinstance(record, ArrayRecord) else record.copy()
        for name, record in message.content.items()
    }
    return with_content(message, record_dict(records))

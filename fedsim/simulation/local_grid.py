"""Flower's `Grid` in one process: a message is a function call.

Unchanged ServerApps, Strategies and ClientApps run on it without Ray and without serialization.

Semantics, where Flower's own simulation leaves a choice:

- Nodes are `FIRST_NODE + partition`, in a stable order.
- Replies come lazily, one at a time, in the order of the requests: a strategy that consumes them as
  a stream never holds more than one. `push_messages` followed by `pull_messages` works as well.
- Each client gets records of its own; they share the arrays' numbers, which cannot be written to.
- An app that can answer many requests at once (`ManyAnswers`) gets them in groups, a group when its
  first reply is asked for.
- A client's `Context` keeps what it wrote before an exception. For a privacy account that is the
  safe side.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from flwr.app import (
    ArrayRecord,
    Context,
    Error,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.clients.many import ManyAnswers
from fedsim.server.live_arrays import live_record
from fedsim.simulation.answering import answers_of
from fedsim.simulation.flower_internals import CLIENT_RAISED, empty_run, stamp, with_content

logger = logging.getLogger(__name__)

FIRST_NODE = 1000


class LocalGrid(Grid):
    """A grid of `num_clients` virtual nodes, each with a persistent `Context`."""

    def __init__(self, client_app: ClientApp, num_clients: int, *, run_id: int = 1) -> None:
        self._client_app = client_app
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
        """Accept messages and return their ids; each is executed when it is pulled."""
        ids = []
        for message in messages:
            message_id = str(next(self._ids))
            stamp(message, message_id)
            self._pushed[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the given messages; an id that was pulled before has none."""
        return [
            self._execute(self._pushed.pop(message_id))
            for message_id in message_ids
            if message_id in self._pushed
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the reply to each message as soon as it exists.

        A timeout cannot interrupt a client of the same process and is ignored.
        """
        live = _LiveArrays()
        for group in self._groups(messages):
            for message in group:
                stamp(message, str(next(self._ids)))
            requests = [
                (_private_copy(message, live), self._contexts[message.metadata.dst_node_id])
                for message in group
            ]
            answers = answers_of(self._client_app, requests)
            for message, answer in zip(group, answers, strict=True):
                yield self._reply(message, answer)

    def _groups(self, messages: Iterable[Message]) -> Iterator[list[Message]]:
        """Cut the requests into groups of one kind that the app takes at once."""
        app = self._client_app
        group: list[Message] = []
        for message in messages:
            full = not isinstance(app, ManyAnswers) or len(group) >= app.group_size
            if group and (full or message.metadata.message_type != group[0].metadata.message_type):
                yield group
                group = []
            group.append(message)
        if group:
            yield group

    def _execute(self, message: Message) -> Message:
        context = self._contexts[message.metadata.dst_node_id]
        request = _private_copy(message, _LiveArrays()), context
        (answer,) = answers_of(self._client_app, [request])
        return self._reply(message, answer)

    def _reply(self, message: Message, answer: Message | Exception) -> Message:
        if isinstance(answer, Exception):
            node_id = message.metadata.dst_node_id
            logger.debug("node %d raised", node_id, exc_info=answer)
            reason = f"{type(answer).__name__}: {answer}"
            answer = Message(Error(CLIENT_RAISED, reason), reply_to=message)
        stamp(answer, str(next(self._ids)))
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
    copy = RecordDict()
    for name, record in message.content.items():
        copy[name] = live.of(record) if isinstance(record, ArrayRecord) else record.copy()
    return with_content(message, copy)

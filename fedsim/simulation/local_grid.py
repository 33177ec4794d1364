"""Flower's `Grid` in one process: a message is a function call.

Unchanged ServerApps, Strategies and ClientApps run on it without Ray and without serialization.

Semantics, where Flower's own simulation leaves a choice:

- Nodes are `FIRST_NODE + partition`, in a stable order.
- Replies come lazily, one at a time, in the order of the requests: a strategy that consumes them as
  a stream never holds more than one. `push_messages` followed by `pull_messages` works as well.
- Each client gets records of its own; the arrays' bytes are shared and never written to.
- A client's `Context` keeps what it wrote before an exception. For a privacy account that is the
  safe side.
"""

import logging
import traceback
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
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

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
        for message in messages:
            stamp(message, str(next(self._ids)))
            yield self._execute(message)

    def _execute(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        try:
            reply = self._client_app(_private_copy(message), self._contexts[node_id])
        except Exception as error:  # noqa: BLE001  whatever a client raises is that client's failure
            logger.debug("node %d raised\n%s", node_id, traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(CLIENT_RAISED, reason), reply_to=message)
        stamp(reply, str(next(self._ids)))
        return reply


def _private_copy(message: Message) -> Message:
    """Return the message with records of its own: strategies share one RecordDict among all."""
    copy = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            copy[name] = ArrayRecord(dict(record.items()))
        elif isinstance(record, MetricRecord):
            copy[name] = MetricRecord(dict(record.items()))
        else:
            copy[name] = ConfigRecord(dict(record.items()))
    return with_content(message, copy)

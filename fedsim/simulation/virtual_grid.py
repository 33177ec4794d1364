"""Base class of the simulated grids: nodes with contexts, pushed messages, clients' answers.

A node's context is created with its first message, as a context is half a kilobyte of Python
objects: of 100,000 clients, of which a round asks 1,000, most get a context late or never.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.clients.app import AnswerGroup, BatchAnswers
from fedsim.core.plugin_errors import contained_exits
from fedsim.protocol.flower_internals import CLIENT_RAISED, empty_run, set_message_id

FIRST_NODE = 1000


class NodeContexts(Mapping[int, Context]):
    """The contexts of some nodes by node id, which is `FIRST_NODE + partition`.

    A pickle holds the contexts that exist; the others are created where it is unpickled.

    Args:
        partitions: the numbers of the nodes, in the order of iteration.
        num_nodes: the number of nodes of the federation.
        run_id: Flower's id of the run.
    """

    def __init__(self, partitions: Iterable[int], *, num_nodes: int, run_id: int) -> None:
        self._made: dict[int, Context] = {}
        numbers = partitions if isinstance(partitions, range) else tuple(partitions)
        self._partitions: range | frozenset[int] = (
            numbers if isinstance(numbers, range) else frozenset(numbers)
        )
        self._order = numbers
        self._num_nodes, self._run_id = num_nodes, run_id

    @property
    def partitions(self) -> range | tuple[int, ...]:
        """The numbers of the nodes, in the order of iteration."""
        return self._order

    def __getitem__(self, node: int) -> Context:
        """Return the context of a node, always the same object.

        Raises:
            KeyError: the node is not one of these nodes.
        """
        if node not in self._made:
            if node not in self:
                raise KeyError(node)
            self._made[node] = Context(
                run_id=self._run_id,
                node_id=node,
                node_config={
                    "partition-id": node - FIRST_NODE,
                    "num-partitions": self._num_nodes,
                },
                state=RecordDict(),
                run_config={},
            )
        return self._made[node]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node - FIRST_NODE in self._partitions

    def __iter__(self) -> Iterator[int]:
        return (FIRST_NODE + partition for partition in self._order)

    def __len__(self) -> int:
        return len(self._order)


FlowerRecord = ArrayRecord | MetricRecord | ConfigRecord


class VirtualGrid(Grid):
    """A grid of `num_clients` nodes with ids `FIRST_NODE + partition`, each with a `Context`.

    Subclasses implement `send_and_receive`.

    Args:
        num_clients: the number of nodes.
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
        """Store messages and return their ids; the messages are answered when they are pulled."""
        ids = []
        for message in messages:
            self._set_id(message)
            self._pushed[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages, by message ids; a second pull of an id has no reply."""
        known = [self._pushed.pop(name) for name in message_ids if name in self._pushed]
        return list(self.send_and_receive(known))

    @abstractmethod
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the reply to each message as replies arrive.

        Args:
            messages: the requests.
            timeout: the longest time to wait for all replies, in seconds; None for no limit.
        """

    def _set_id(self, message: Message) -> None:
        """Set the id of a message that has none."""
        if not message.metadata.message_id:
            set_message_id(message, str(next(self._ids)))


def failure(request: Message, reason: str) -> Message:
    """Return the error message that replies for a failed client.

    Args:
        request: the message to the client.
        reason: the text of the failure.
    """
    return Message(Error(CLIENT_RAISED, reason), reply_to=request)


_Answer = TypeVar("_Answer")


def answer_requests(
    app: ClientApp, requests: Sequence[tuple[Message, Context]]
) -> Iterator[AnswerGroup]:
    """Ask a client app, and yield groups of answers in the order of the requests.

    An app with Flower mods, or one that is not fedsim's, is called with each message.

    Args:
        app: the clients' app.
        requests: messages of one kind, each with the context of its client.
    """
    train = bool(requests) and requests[0][0].metadata.message_type == MessageType.TRAIN
    if isinstance(app, BatchAnswers) and app.takes_batches and train:
        yield from app.answer_batch(requests)
        return
    for message, context in requests:
        try:
            with contained_exits():
                answer: Message | Exception = app(message, context)
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            answer = error
        yield [answer]


def chunk_by_time(
    groups: Iterable[Iterable[_Answer]],
    count: int,
    *,
    chunk_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[list[_Answer], float]]:
    """Collect answers in chunks of a least duration; yield each chunk and its seconds.

    A chunk ends with the group of answers in which its time runs out, so that the receiver can
    process it while the next group is computed.

    Args:
        groups: the groups of answers.
        count: the number of all answers; the last answer ends the last chunk.
        chunk_seconds: the least time of a chunk except the last, in seconds.
        clock: returns the time in seconds.
    """
    chunk: list[_Answer] = []
    start, left = clock(), count
    for group in groups:
        chunk += group
        seconds = clock() - start
        if chunk and (len(chunk) == left or seconds >= chunk_seconds):
            left -= len(chunk)
            yield chunk, seconds
            chunk, start = [], clock()

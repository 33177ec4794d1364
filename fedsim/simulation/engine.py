"""Common parts of all engines: their interface, the grid of simulated nodes, memory of a process.

An engine runs a ServerApp and a ClientApp to the end of a federation.
"""

import ctypes
import gc
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
    UserConfigValue,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.accountant.ledger.journal import Journal
from fedsim.clients.app import AnswerGroup, BatchAnswers
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.plugin_errors import contained_exits, error_text, type_name
from fedsim.protocol.flower_internals import CLIENT_RAISED, empty_run, set_message_id

# Creates the ClientApp of some clients in the calling process; charges go to the given journal.
# A factory must survive pickling.
ShardFactory = Callable[[Journal | None], ClientApp]
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20
# 10 to 40 training steps create 20,000 objects; their tensors may be in reference cycles.
_GC_THRESHOLDS = (20_000, 10, 50)


class EngineError(FedsimError, RuntimeError):
    """Raised if an engine cannot run on this machine; the message says what the engine needs."""

    exit_code = ExitCode.WRONG_INPUT


class Engine(ABC):
    """Base class of engines, which execute a federation; all engines give the same result.

    Attributes:
        one_operator: whether a single party operates all nodes.
        writes_ledger: whether privacy charges go to the ledger in the run directory. Otherwise the
            ledgers are on the nodes, and the run directory gets a copy at the end.
        plans_blocks: whether groups of clients (blocks) train together, with their models stacked
            in one tensor. Otherwise each client trains alone.
    """

    one_operator: bool = True
    writes_ledger: bool = True
    plans_blocks: bool = True

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold what `execute` needs, such as a connection to Ray, during a `with` block.

        If no session is open, `execute` opens one. A run opens a session before it creates the run
        directory, so that a failed session leaves no files behind.

        Raises:
            EngineError: the engine cannot run on this machine.
        """
        yield

    @abstractmethod
    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation until its server app returns.

        Args:
            server_app: the app of the server.
            client_app: the app that every node runs.
            num_nodes: the number of nodes: clients, and helpers of secure aggregation.
        """


@runtime_checkable
class ShardableApp(Protocol):
    """Interface of a ClientApp that can be split over processes."""

    @property
    def ledger(self) -> Path | None:
        """Path of the privacy ledger's file; None if the app records no charges."""
        ...

    def expected_work(self) -> Sequence[float]:
        """Return the expected work of each client, by client number; only ratios matter."""
        ...

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return ranges of client numbers, ascending; clients of one range must share a process."""
        ...

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the first client of the group (block) with which a client answers a message.

        Args:
            client: the client that receives the message.
            message: the request.
        """
        ...

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a picklable function that a worker process calls to create an app of some clients.

        Args:
            clients: the numbers of these clients.
        """
        ...


@dataclass(frozen=True)
class UnshardedApp:
    """Wrapper for any ClientApp that can be pickled; every process gets the whole app."""

    client_app: ClientApp
    num_clients: int
    ledger: Path | None = None

    def expected_work(self) -> Sequence[float]:
        """Return equal work for all clients, because their work is unknown."""
        return [1.0] * self.num_clients

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return one range for each client, because any process can run any client."""
        return [(client,) for client in range(self.num_clients)]

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the client itself, because every client answers alone."""
        return client

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a function that returns the whole app."""
        return self.whole_app

    def whole_app(self, journal: Journal | None) -> ClientApp:
        """Return the app of all clients, which records no charges."""
        return self.client_app


def keep_freed_memory() -> bool:
    """Tell the C library to reuse freed memory instead of returning it to the system.

    Training allocates and frees the same tensors in every step. By default glibc returns blocks
    above 128 kB to the system, so the next step has a page fault for each 4 kB. That can take
    longer than the arithmetic. No result changes, but the process keeps its peak memory.

    Returns:
        Whether the C library accepted the settings. Without glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 << 20),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def freeze_objects() -> None:
    """Exclude all existing objects from garbage collection, and make later collections rarer."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection during a `with` block.

    Collections are also rarer in the block. Messages trigger collections, and a full one visits
    hundreds of thousands of objects of torch and Flower that are not garbage. With Python's own
    thresholds that takes 5 % of a round of small clients.
    """
    thresholds = gc.get_threshold()
    freeze_objects()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


logger = logging.getLogger(__name__)

FIRST_NODE = 1000
RUN_ID = 1
"""Flower's id of a simulated run."""


class NodeContexts(Mapping[int, Context]):
    """Flower contexts of some nodes by node id, each created when it is first needed.

    The id of a node is `FIRST_NODE` plus its number. A pickle holds only the contexts that exist;
    the others are created after unpickling.

    Args:
        partitions: the numbers of the nodes; the mapping iterates in this order.
        num_nodes: the number of nodes of the federation.
        run_config: the configuration of the run, of which each context has a copy.
    """

    def __init__(
        self,
        partitions: Iterable[int],
        *,
        num_nodes: int,
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        self._made: dict[int, Context] = {}
        self._partitions: range | dict[int, None] = (
            partitions if isinstance(partitions, range) else dict.fromkeys(partitions)
        )
        self._num_nodes = num_nodes
        self._run_config = {} if run_config is None else run_config

    def __getitem__(self, node: int) -> Context:
        """Return the context of a node, always the same object.

        Raises:
            KeyError: the node is not one of these nodes.
        """
        if node not in self._made:
            if node not in self:
                raise KeyError(node)
            self._made[node] = Context(
                run_id=RUN_ID,
                node_id=node,
                node_config={
                    "partition-id": node - FIRST_NODE,
                    "num-partitions": self._num_nodes,
                },
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
        return self._made[node]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node - FIRST_NODE in self._partitions

    def __iter__(self) -> Iterator[int]:
        return (FIRST_NODE + partition for partition in self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)


FlowerRecord = ArrayRecord | MetricRecord | ConfigRecord


class VirtualGrid(Grid):
    """Simulated grid of `num_clients` nodes, each with a `Context`.

    Node ids are `FIRST_NODE` plus the number of the node. Subclasses implement `send_and_receive`.

    Args:
        num_clients: the number of nodes.
        run_config: the configuration of the run in the context of every node.
    """

    def __init__(
        self,
        num_clients: int,
        *,
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        self._run = empty_run(RUN_ID)
        self._contexts = NodeContexts(
            range(num_clients), num_nodes=num_clients, run_config=run_config
        )
        self._ids = count(1)
        self._pushed: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Replace Flower's description of the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """Flower's description of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; Flower keeps this method for old apps."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @property
    def node_range(self) -> range:
        """Ids of all nodes, in the order of their numbers."""
        return range(FIRST_NODE, FIRST_NODE + len(self._contexts))

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, in the order of their numbers."""
        return list(self.node_range)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; `pull_messages` sends them."""
        ids = []
        for message in messages:
            self._set_id(message)
            self._pushed[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Send the stored messages with these ids and return the replies; an id works only once."""
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
    """Return an error message as the reply of a client that failed.

    Args:
        request: the message to the client.
        reason: the text of the failure.
    """
    return Message(Error(CLIENT_RAISED, reason), reply_to=request)


def failure_reason(node: int, error: Exception) -> str:
    """Log an error that a node's app raised, and return a text that tells the server why."""
    logger.debug("node %d raised", node, exc_info=error)
    return f"{type_name(error)}: {error_text(error)}"


def reply_of(request: Message, answer: Message | Exception) -> Message:
    """Return a client's answer to a message; an exception becomes an error message."""
    if isinstance(answer, Exception):
        return failure(request, failure_reason(request.metadata.dst_node_id, answer))
    return answer


_Answer = TypeVar("_Answer")


def answer_requests(
    app: ClientApp, requests: Sequence[tuple[Message, Context]]
) -> Iterator[AnswerGroup]:
    """Call a client app with requests and yield groups of answers, in the order of the requests.

    An app with Flower mods, or an app that is not fedsim's, is called once for each message, and
    each of its groups has one answer.

    Args:
        app: the app that the clients run.
        requests: messages of one type, each with the context of its client.
    """
    train = bool(requests) and requests[0][0].metadata.message_type == MessageType.TRAIN
    if isinstance(app, BatchAnswers) and app.takes_batches and train:
        yield from app.answer_batch(requests)
        return
    for message, context in requests:
        try:
            with contained_exits():
                answer: Message | Exception = app(message, context)
            if not isinstance(answer, Message):
                kind = type(answer).__name__
                raise TypeError(f"a client's app must return a Message, got {kind}")
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
    """Collect answers into chunks, and yield each chunk with the seconds that it took to compute.

    A chunk ends after the first group at which the minimum duration has passed. The receiver can
    then process the chunk while the next group is computed.

    Args:
        groups: the answers in groups, each group computed when it is read.
        count: the total number of answers; the last answer ends the last chunk.
        chunk_seconds: the minimum duration of every chunk but the last, in seconds.
        clock: function that returns the time in seconds.
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

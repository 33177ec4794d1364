"""Common parts of all engines: their interface, apps that they split, and memory of a process.

An engine runs a ServerApp and a ClientApp to the end of a federation.
"""

import ctypes
import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.accountant.ledger.journal import Journal
from fedsim.core.errors import ExitCode, FedsimError

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
        patience: the longest time to wait for all nodes to register, in seconds.
        one_operator: whether a single party operates all nodes.
        writes_ledger: whether privacy charges go to the ledger in the run directory. Otherwise the
            ledgers are on the nodes, and the run directory gets a copy at the end.
        plans_blocks: whether groups of clients (blocks) train together, with their models stacked
            in one tensor. Otherwise each client trains alone.
    """

    patience: float = 60.0
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

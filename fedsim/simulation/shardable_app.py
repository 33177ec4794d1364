"""Client apps that can be split over processes, each with the data of its own clients only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal

# Creates the ClientApp of some clients in the calling process; charges go to the given journal.
# A factory must survive pickling.
ShardFactory = Callable[[Journal | None], ClientApp]


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

"""Client apps that can be split over processes, so that each holds only its clients' data."""

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
    """A ClientApp that can be split over processes."""

    @property
    def ledger(self) -> Path | None:
        """The file of the durable ledger; None without a ledger."""
        ...

    def expected_work(self) -> Sequence[float]:
        """Return the expected work of each client, in any unit."""
        ...

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return the ranges of clients that stay in one process, ascending; each client once."""
        ...

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the first client of the block in which a client answers a message.

        Args:
            client: the client that receives the message.
            message: the request.
        """
        ...

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a picklable factory of the app of the given clients, for another process."""
        ...


@dataclass(frozen=True)
class UnshardedApp:
    """Wraps any ClientApp that can be pickled; every process gets the whole app."""

    client_app: ClientApp
    num_clients: int
    ledger: Path | None = None

    def expected_work(self) -> Sequence[float]:
        """Return the same work for each client, as nothing is known."""
        return [1.0] * self.num_clients

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return a range for each client, as clients may be on any worker."""
        return [(client,) for client in range(self.num_clients)]

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the client, as every client answers alone."""
        return client

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a factory of the whole app."""
        return _WholeAppFactory(self.client_app)


@dataclass(frozen=True)
class _WholeAppFactory:
    client_app: ClientApp

    def __call__(self, journal: Journal | None) -> ClientApp:
        return self.client_app

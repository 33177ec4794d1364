"""Client apps that can be split over processes, so that each holds the data of its own clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal

# Makes the ClientApp of some clients in the calling process; they charge to the given journal.
# A factory must survive pickling.
ShardFactory = Callable[[Journal | None], ClientApp]


@runtime_checkable
class ShardableApp(Protocol):
    """A ClientApp that can be split over processes."""

    @property
    def ledger(self) -> Path | None:
        """File of the durable ledger; None without a ledger."""
        ...

    def expected_work(self) -> Sequence[float]:
        """Return the expected work of each client, in any unit."""
        ...

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return the clients that stay together in one process, ascending; each client once."""
        ...

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the first client of the block that answers a message together.

        Args:
            client: the client that gets the message.
            message: the request.
        """
        ...

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return the factory of the app of the given clients, for another process."""
        ...


@dataclass(frozen=True)
class UnshardedApp:
    """Any ClientApp that can be pickled; every process gets the whole app."""

    client_app: ClientApp
    num_clients: int
    ledger: Path | None = None

    def expected_work(self) -> Sequence[float]:
        """Return equal work for each client."""
        return [1.0] * self.num_clients

    def ranges(self) -> Sequence[Sequence[int]]:
        """Return each client by itself."""
        return [(client,) for client in range(self.num_clients)]

    def first_of_block(self, client: int, message: Message) -> int:
        """Return the client: each answers by itself."""
        return client

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a factory of the whole app."""
        return _WholeAppFactory(self.client_app)


@dataclass(frozen=True)
class _WholeAppFactory:
    client_app: ClientApp

    def __call__(self, journal: Journal | None) -> ClientApp:
        return self.client_app

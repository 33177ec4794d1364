"""Client apps that can be split over processes, so that each holds the data of its own clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

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

    def shard(self, clients: Sequence[int]) -> ShardFactory:
        """Return a factory of the whole app."""
        return _WholeAppFactory(self.client_app)


@dataclass(frozen=True)
class _WholeAppFactory:
    client_app: ClientApp

    def __call__(self, journal: Journal | None) -> ClientApp:
        return self.client_app

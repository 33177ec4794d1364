"""Clients that can be divided among processes, each process with the data of its own only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Journal

# Makes the ClientApp of some clients in the process that calls it, charging to the given journal.
# It must survive pickling.
Shard = Callable[[Journal | None], ClientApp]


@runtime_checkable
class Sharded(Protocol):
    """A ClientApp that can be divided."""

    @property
    def ledger(self) -> Path | None:
        """File of the durable ledger; None where nothing is charged durably."""
        ...

    def work(self) -> Sequence[float]:
        """Return the expected work of each client, in any unit."""
        ...

    def shard(self, clients: Sequence[int]) -> Shard:
        """Return what another process needs to be the given clients."""
        ...


@dataclass(frozen=True)
class Undivided:
    """Any ClientApp that can be pickled, as it is: every process gets all of it."""

    client_app: ClientApp
    num_clients: int
    ledger: Path | None = None

    def work(self) -> Sequence[float]:
        """Return equal work for each client."""
        return [1.0] * self.num_clients

    def shard(self, clients: Sequence[int]) -> Shard:
        """Return the whole app."""
        return _Whole(self.client_app)


@dataclass(frozen=True)
class _Whole:
    client_app: ClientApp

    def __call__(self, journal: Journal | None) -> ClientApp:
        return self.client_app

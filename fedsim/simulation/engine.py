"""Interface of engines, which run a ServerApp and a ClientApp to the end of a federation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.core.errors import ExitCode, FedsimError


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

"""The interface of engines, which run a ServerApp and a ClientApp to the end of a federation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.core.errors import ExitCode, FedsimError


class EngineError(FedsimError, RuntimeError):
    """The engine cannot run here; the message says what it needs."""

    exit_code = ExitCode.WRONG_INPUT


class Engine(ABC):
    """Base class of engines, which execute a federation and all give the same result.

    Attributes:
        patience: the longest time to wait for all nodes to register, in seconds.
        one_operator: whether one party operates all nodes.
        writes_ledger: whether clients are charged in the ledger of the run directory. Otherwise the
            ledgers are on the nodes, and the run directory gets a copy at the end.
        plans_blocks: whether clients train vectorized in the planned blocks; otherwise each client
            trains alone.
    """

    patience: float = 60.0
    one_operator: bool = True
    writes_ledger: bool = True
    plans_blocks: bool = True

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the resources of `execute`, such as a connection to Ray, during a `with` block.

        Without an open session, `execute` opens one. A run opens the session before it creates its
        directory, so that an engine that cannot run leaves no files.

        Raises:
            EngineError: the engine cannot run here.
        """
        yield

    @abstractmethod
    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation until its server app returns.

        Args:
            server_app: the app of the server.
            client_app: the app of every node.
            num_nodes: the number of nodes, which are clients and helpers of secure aggregation.
        """

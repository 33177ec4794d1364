"""The interface of engines: one ServerApp and one ClientApp in, a finished federation out."""

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
    """Executes a federation. Every engine gives the same result.

    Attributes:
        patience: seconds to wait for all nodes and their replies to the roll call.
        one_operator: whether one party operates all nodes.
        writes_ledger: whether clients are charged in the run's own ledger. Otherwise the ledger is
            on the nodes, and the run has a copy at its end.
        plans_blocks: whether clients train in the planned blocks; otherwise each one is alone.
    """

    patience: float = 60.0
    one_operator: bool = True
    writes_ledger: bool = True
    plans_blocks: bool = True

    @contextmanager
    def session(self) -> Iterator[None]:
        """Have what `execute` needs during the block; alone, `execute` opens a session of its own.

        A run opens it before it has a directory: an engine that cannot run leaves no files.

        Raises:
            EngineError: the engine cannot run here.
        """
        yield

    @abstractmethod
    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation until the server app returns.

        Args:
            server_app: the server.
            client_app: the app of every node.
            num_nodes: number of nodes: clients, and helpers of secure aggregation.
        """

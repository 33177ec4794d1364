"""The interface of engines: one ServerApp and one ClientApp in, a finished federation out."""

from abc import ABC, abstractmethod

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.core.errors import ExitCode, FedsimError


class EngineError(FedsimError, RuntimeError):
    """An engine that cannot run here; the message says what it needs."""

    exit_code = ExitCode.WRONG_INPUT


class Engine(ABC):
    """Executes a federation. No engine changes its result.

    `patience`: seconds in which all nodes must be there and have said who they are;
    `one_operator`: whether one party runs all of them.
    """

    patience: float = 60.0
    one_operator: bool = True

    @abstractmethod
    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run `server_app` against `num_nodes` nodes of `client_app` until it returns."""

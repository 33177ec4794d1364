"""The engines by name: local, Ray, and Flower's own simulation."""

import logging
from importlib.util import find_spec

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.simulation.engine import Engine, EngineError
from fedsim.simulation.flower_internals import preserve_identity, server_identity
from fedsim.simulation.local_grid import LocalGrid
from fedsim.simulation.memory import frozen_objects, keep_freed_memory
from fedsim.simulation.settings import RuntimeSettings

_RUN_ID = 1


class LocalEngine(Engine):
    """Runs all clients in this process, without serialization."""

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation until the server app returns (see `Engine`)."""
        keep_freed_memory()
        with frozen_objects(), server_identity(_RUN_ID):
            server_app(
                LocalGrid(client_app, num_nodes, run_id=_RUN_ID),
                Context(
                    run_id=_RUN_ID, node_id=0, node_config={}, state=RecordDict(), run_config={}
                ),
            )


class FlowerEngine(Engine):
    """Flower's own simulation runtime: clients in Ray worker processes (extra `ray`).

    Args:
        workers: Ray workers, each with one thread.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation until the server app returns (see `Engine`).

        Raises:
            EngineError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise EngineError(
                "engine flower needs Ray: install the extra with pip install 'fedsim-dp[ray]', "
                "or use engine: local"
            )
        from flwr.simulation import run_simulation

        logging.getLogger("flwr").setLevel(logging.ERROR)
        with preserve_identity():
            run_simulation(
                server_app,
                client_app,
                num_supernodes=num_nodes,
                backend_config={
                    "init_args": {
                        "address": "local",  # else Ray joins a cluster that runs on this machine
                        "num_cpus": self._workers,
                        "logging_level": logging.ERROR,
                        "log_to_driver": False,
                    },
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )


def engine_for(settings: RuntimeSettings) -> Engine:
    """Return the engine that the settings name."""
    match settings.engine:
        case "local":
            return LocalEngine()
        case "flower":
            return FlowerEngine(settings.workers)
        case "ray":
            from fedsim.simulation.ray.engine import RayEngine

            return RayEngine(settings)

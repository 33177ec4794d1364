"""Choice of the engine by name: local, Ray, or Flower's simulation."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, Thread, current_thread
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.protocol.flower_internals import preserve_identity
from fedsim.simulation.engine import Engine, EngineError
from fedsim.simulation.local_engine import LocalEngine
from fedsim.simulation.settings import RuntimeSettings


class FlowerEngine(Engine):
    """Engine that uses Flower's simulation runtime with Ray workers (extra `ray`).

    Args:
        workers: the number of Ray workers, each with one thread.
    """

    plans_blocks = False

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @contextmanager
    def session(self) -> Iterator[None]:
        """Check that Ray is installed; no resources are held.

        Raises:
            EngineError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise EngineError(
                "engine flower needs Ray: install the extra with pip install 'fedsim-dp[ray]', "
                "or use engine: local"
            )
        yield

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation in Flower's simulation until the server app returns."""
        from flwr.simulation import run_simulation

        from fedsim.simulation.ray.session import local_ray

        logging.getLogger("flwr").setLevel(logging.ERROR)
        server = _StoppableServer(server_app)
        with preserve_identity(), local_ray(num_cpus=self._workers):
            try:
                run_simulation(
                    server.app,
                    client_app,
                    num_supernodes=num_nodes,
                    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
                )
            except KeyboardInterrupt:
                server.stop()
                raise


class _StoppableServer:
    """A server app in a thread of Flower's runtime that can be stopped from the main thread.

    Without it the server would go on, and write files, after an interrupt of the main thread.

    Attributes:
        app: the ServerApp that runs `server_app` and can be stopped.
    """

    def __init__(self, server_app: ServerApp) -> None:
        self._stop = Event()
        self._thread: Thread | None = None
        self.app = ServerApp()

        @self.app.main()
        def main(grid: Grid, context: Context) -> None:
            self._thread = current_thread()
            for name in ("get_node_ids", "push_messages", "pull_messages"):
                setattr(grid, name, self._checked(getattr(grid, name)))
            server_app(grid, context)

    def stop(self) -> None:
        """Make the server's next call of the grid raise, and wait until its thread has ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._stop.is_set():
                raise EngineError("the run was interrupted")
            return method(*arguments, **options)

        return call


def engine_for(settings: RuntimeSettings) -> Engine:
    """Return the engine that the settings of `runtime:` name."""
    match settings.engine:
        case "local":
            return LocalEngine()
        case "flower":
            return FlowerEngine(settings.workers)
        case "ray":
            from fedsim.simulation.ray.engine import RayEngine

            return RayEngine(settings)

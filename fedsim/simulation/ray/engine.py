"""The Ray engine: clients in worker processes of this machine or of a Ray cluster."""

import logging
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.simulation.engine import (
    Engine,
    EngineError,
)
from fedsim.simulation.flower_internals import server_identity
from fedsim.simulation.memory import frozen_objects, keep_freed_memory
from fedsim.simulation.ray.placement import longest_first
from fedsim.simulation.settings import RuntimeSettings
from fedsim.simulation.shardable_app import Sharded, Undivided

_RUN_ID = 1
_PATIENCE = 180.0  # seconds for the workers to start
_PATIENCE_TO_CONNECT = 10.0
_OBJECT_STORE = 512 << 20  # the global model and replies on their way; more goes to disk
# Replies travel with the call that asked for them, not over the object store, and nothing is
# recorded for a dashboard that does not run: half of what Ray costs for a client's round.
_LEAN = {
    "max_direct_call_object_size": 16 << 20,
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
}
_LEAST_OBJECT_STORE = 80 << 20  # Ray refuses less


class RayEngine(Engine):
    """Clients pinned to worker processes, with Ray between them (extra `ray`).

    Args:
        settings: `workers`, `address` and `device` of `runtime:`.
        object_store: bytes of shared memory of a Ray that is started here.
        replacement: seconds in which a worker that died must be replaced; after that, its clients
            fail until there is room for it.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        *,
        object_store: int = _OBJECT_STORE,
        replacement: float = _PATIENCE,
    ) -> None:
        self._settings = settings
        self._object_store = object_store
        self._replacement = replacement

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run `server_app` against `num_nodes` nodes of `client_app` until it returns.

        A `Sharded` app is divided, so that a worker holds the data of its own clients only.
        Whatever happens, no process of this run is left behind.

        Raises:
            EngineError: Ray is not installed, the cluster cannot be reached or is too small, or the
                workers do not start.
        """
        if find_spec("ray") is None:
            raise EngineError(
                "engine ray needs Ray: install the extra with pip install 'fedsim-dp[ray]', "
                "or use engine: local"
            )
        clients = (
            client_app if isinstance(client_app, Sharded) else Undivided(client_app, num_nodes)
        )
        from fedsim.simulation.ray.grid import RayGrid

        grid = RayGrid(num_nodes, run_id=_RUN_ID)
        server = Context(
            run_id=_RUN_ID, node_id=0, node_config={}, state=RecordDict(), run_config={}
        )
        keep_freed_memory()
        with (
            self._connected(),
            self._workers(grid, clients),
            server_identity(_RUN_ID),
            frozen_objects(),
        ):
            server_app(grid, server)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Join the cluster, or start one here; leave it, or stop it, at the end."""
        import ray

        address = self._settings.address
        if address is not None:
            _check_reachable(address)
        if ray.is_initialized():  # by whoever calls: theirs to stop
            yield
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if address is None:
                ray.init(
                    address="local",  # else it joins any Ray that runs on this machine
                    num_cpus=self._settings.workers,
                    include_dashboard=False,
                    object_store_memory=_fitting(self._object_store),
                    _system_config=_LEAN,
                    **quiet,
                )
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = "Ray does not start" if address is None else f"no Ray cluster at {address}"
            raise EngineError(f"runtime.address: {what}: {_first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def _workers(self, grid: Any, clients: Sharded) -> Iterator[None]:
        import ray

        from fedsim.simulation.ray.pool import WorkerPool

        shares = longest_first(clients.work(), self._settings.workers)
        gpus = self._check_resources(len(shares))
        keeper = None if clients.ledger is None else _start_keeper(clients.ledger)
        workers = [
            _worker(number, share, grid.contexts(share), clients, keeper, gpus)
            for number, share in enumerate(shares)
        ]
        try:
            for worker in workers:
                worker.start()
            _await(workers)
            grid.employ(WorkerPool(workers, patience=self._replacement))
            yield
        finally:
            for worker in workers:
                worker.dismiss()
            if keeper is not None:
                ray.kill(keeper)

    def _check_resources(self, workers: int) -> float:
        """Return each worker's share of a GPU.

        Raises:
            EngineError: fewer processors than workers.
        """
        import ray

        there = ray.cluster_resources()
        processors = int(there.get("CPU", 0))
        if processors < workers:
            raise EngineError(
                f"runtime.workers: {workers} workers need a processor each, but the Ray cluster "
                f"has {processors}; use fewer workers or add machines"
            )
        gpus = int(there.get("GPU", 0))
        if self._settings.device == "cpu" or gpus == 0:
            return 0.0
        return 1 / ceil(workers / gpus)


def _worker(
    number: int,
    share: Sequence[int],
    contexts: Sequence[Context],
    clients: Sharded,
    keeper: Any | None,
    gpus: float,
) -> Any:
    import ray

    from fedsim.simulation.ray.host import ClientHost
    from fedsim.simulation.ray.pool import Worker

    host = ray.remote(ClientHost).options(num_cpus=1, num_gpus=gpus)

    def hire(recorded: Sequence[Context]) -> Any:
        return host.remote(clients.shard(share), recorded, keeper)

    return Worker(number, contexts, hire)


def _start_keeper(ledger: Path) -> Any:
    """Start the ledger's keeper on this machine; it is restarted if it dies, and asked again."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from fedsim.simulation.ray.journal import JournalKeeper

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    keeper = ray.remote(JournalKeeper).options(
        num_cpus=0, scheduling_strategy=here, max_restarts=5, max_task_retries=5
    )
    return keeper.remote(ledger.absolute())


def _await(workers: Sequence[Any]) -> None:
    """Wait until all workers stand, with the versions of this process.

    Raises:
        EngineError: one did not start, or has other versions.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from fedsim.simulation.ray.host import versions

    here = versions()
    for worker in workers:
        try:
            there: dict[str, str] = ray.get(worker.greeting, timeout=_PATIENCE)
        except GetTimeoutError as error:
            raise EngineError(
                f"runtime.workers: worker {worker.number} of {len(workers)} did not start within "
                f"{_PATIENCE:g} s; the cluster may be busy with other work"
            ) from error
        except RayError as error:
            raise EngineError(
                f"worker {worker.number} does not start: {_last_line(error)}"
            ) from error
        different = [name for name in here if there[name] != here[name]]
        if different:
            raise EngineError(
                f"worker {worker.number} has "
                + ", ".join(
                    f"{name} {there[name]} where {here[name]} is here" for name in different
                )
                + "; the result could differ: install the same versions on every machine"
            )


def _check_reachable(address: str) -> None:
    """Try `host:port`: Ray itself would go on trying for minutes.

    Raises:
        EngineError: nobody answers.
    """
    host, colon, port = address.rpartition(":")
    if not colon:  # auto, local: Ray knows at once
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_TO_CONNECT).close()
    except (OSError, ValueError) as error:
        raise EngineError(
            f"runtime.address: no Ray cluster at {address}: {error}; start one with "
            "'ray start --head' and use the address that it prints"
        ) from error


def _fitting(wanted: int) -> int:
    """Return how much shared memory Ray may take: what is wanted, if the machine has it."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else wanted
    return max(_LEAST_OBJECT_STORE, min(wanted, int(free * 0.8)))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    """Return the last line of a remote traceback, which says what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

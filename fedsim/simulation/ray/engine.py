"""Ray engine: clients in worker processes of this machine or of a Ray cluster."""

import heapq
import logging
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.protocol.flower_internals import server_identity
from fedsim.simulation.engine import (
    RUN_ID,
    Engine,
    EngineError,
    NodeContexts,
    ShardableApp,
    UnshardedApp,
    frozen_objects,
    keep_freed_memory,
)
from fedsim.simulation.settings import RuntimeSettings

logger = logging.getLogger(__name__)

_WORKER_START_SECONDS = 180.0
_REPLACEMENT_SECONDS = 180.0  # then the clients of a dead worker fail until there is room again
_CONNECT_SECONDS = 10.0
_OBJECT_STORE_BYTES = 512 << 20  # holds the global model and replies in transit; Ray spills to disk
# Replies travel with their call, not through the object store, and nothing is recorded for a
# dashboard that does not run. That halves Ray's cost for a client's round.
_RAY_SYSTEM_CONFIG = {
    "max_direct_call_object_size": 16 << 20,
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
}
_MIN_OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less


class RayEngine(Engine):
    """Engine in which each client stays in one Ray worker process (extra `ray`).

    Args:
        settings: the `runtime:` section; `workers`, `address` and `device` are used.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._in_session = False

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        """Run a federation in Ray workers until the server app returns.

        A `ShardableApp` is split, so a worker holds only the data of its own clients. All processes
        of the run end with the run, also after an error.

        Raises:
            EngineError: Ray is not installed, the cluster is out of reach or too small, or workers
                do not start.
        """
        is_federation = isinstance(client_app, ShardableApp)
        clients = client_app if is_federation else UnshardedApp(client_app, num_nodes)
        server = Context(
            run_id=RUN_ID, node_id=0, node_config={}, state=RecordDict(), run_config={}
        )
        with self.session():
            from fedsim.simulation.ray.grid import RayGrid

            keep_freed_memory()
            with self._workers(clients, num_nodes) as pool, server_identity(RUN_ID):
                blocks = clients.first_of_block
                grid = RayGrid(pool, num_nodes, first_of_block=blocks, is_federation=is_federation)
                with frozen_objects():
                    server_app(grid, server)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Stay connected to Ray during a `with` block.

        Raises:
            EngineError: Ray is not installed, or the cluster cannot be reached.
        """
        if self._in_session:
            yield
            return
        if find_spec("ray") is None:
            raise EngineError(
                "engine ray needs Ray: install the extra with pip install 'fedsim-dp[ray]', "
                "or use engine: local"
            )
        with self._connect():
            self._in_session = True
            try:
                yield
            finally:
                self._in_session = False

    @contextmanager
    def _connect(self) -> Iterator[None]:
        """Join the Ray cluster and leave it at the end, or start one here and then stop it."""
        import ray

        from fedsim.simulation.ray.session import connect, local_ray

        address = self._settings.address
        if address is not None:
            _check_reachable(address)
        try:
            with ExitStack() as stack:
                if address is None:
                    stack.enter_context(
                        local_ray(
                            num_cpus=self._settings.workers,
                            object_store_memory=_object_store_bytes(),
                            _system_config=_RAY_SYSTEM_CONFIG,
                        )
                    )
                elif not ray.is_initialized():  # else the caller started Ray and must stop it
                    stack.callback(ray.shutdown)
                    connect(address=address)
                end = stack.pop_all()
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = "Ray does not start" if address is None else f"no Ray cluster at {address}"
            raise EngineError(f"runtime.address: {problem}: {_first_line(error)}") from error
        with end:
            yield

    @contextmanager
    def _workers(self, clients: ShardableApp, num_nodes: int) -> Iterator[Any]:
        """Start a pool of workers, and end their processes after the `with` block."""
        import ray

        from fedsim.simulation.ray.pool import WorkerPool

        ranges = clients.ranges()
        shares = place_ranges(ranges, clients.expected_work(), self._settings.workers)
        if len(shares) < self._settings.workers:
            logger.warning(
                "runtime.workers: %d workers, but only %d start: clients that train together stay "
                "on one worker, and the experiment has %d such ranges; use workers: %d, or a "
                "smaller local.vectorized_clients",
                *(self._settings.workers, len(shares), len(ranges), len(shares)),
            )
        gpus = self._check_resources(len(shares))
        journal_actor = None if clients.ledger is None else _start_journal_actor(clients.ledger)
        workers = [
            _worker(number, share, num_nodes, clients, journal_actor, gpus)
            for number, share in enumerate(shares)
        ]
        try:
            for worker in workers:
                worker.start()
            _await_workers(workers)
            yield WorkerPool(workers, patience=_REPLACEMENT_SECONDS)
        finally:
            for worker in workers:
                worker.stop()
            if journal_actor is not None:
                ray.kill(journal_actor)

    def _check_resources(self, workers: int) -> float:
        """Check that Ray has enough processors; return each worker's share of a GPU.

        Raises:
            EngineError: there are fewer processors than workers.
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
    num_nodes: int,
    clients: ShardableApp,
    journal_actor: Any | None,
    gpus: float,
) -> Any:
    import ray

    from fedsim.simulation.ray.host import ClientHost
    from fedsim.simulation.ray.pool import Worker

    host = ray.remote(ClientHost).options(num_cpus=1, num_gpus=gpus)

    def make_actor(recorded: Any) -> Any:
        return host.remote(clients.shard(share), recorded, journal_actor)

    return Worker(number, NodeContexts(share, num_nodes=num_nodes), make_actor)


def _start_journal_actor(ledger: Path) -> Any:
    """Start the ledger's writer on this machine; if it dies, Ray restarts it and repeats calls."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from fedsim.simulation.ray.journal import JournalActor

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    journal_actor = ray.remote(JournalActor).options(
        num_cpus=0, scheduling_strategy=here, max_restarts=5, max_task_retries=5
    )
    return journal_actor.remote(ledger.absolute())


def _await_workers(workers: Sequence[Any]) -> None:
    """Wait until all workers have started and compare their versions with this process.

    Raises:
        EngineError: a worker did not start, or has other versions.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from fedsim.simulation.ray.host import versions

    here = versions()
    for worker in workers:
        try:
            there: dict[str, str] = ray.get(worker.startup_call, timeout=_WORKER_START_SECONDS)
        except GetTimeoutError as error:
            raise EngineError(
                f"runtime.workers: worker {worker.number} of {len(workers)} did not start within "
                f"{_WORKER_START_SECONDS:g} s; the cluster may be busy with other work"
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
    """Try to connect to `host:port`, since Ray itself retries for minutes.

    Raises:
        EngineError: the connection fails.
    """
    host, colon, port = address.rpartition(":")
    if not colon:  # auto or local, which Ray resolves at once
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise EngineError(
            f"runtime.address: no Ray cluster at {address}: {error}; start one with "
            "'ray start --head' and use the address that it prints"
        ) from error


def _object_store_bytes() -> int:
    """Return the bytes of shared memory for Ray: the usual ones, or less on a smaller machine."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else _OBJECT_STORE_BYTES
    return max(_MIN_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, int(free * 0.8)))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    """Return the last line of a remote traceback, which names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def place_ranges(
    ranges: Sequence[Sequence[int]], work: Sequence[float], workers: int
) -> tuple[tuple[int, ...], ...]:
    """Divide ranges of clients among workers by expected work; return each worker's clients.

    Args:
        ranges: the ranges of clients, ascending; the clients of a range stay on one worker.
        work: the expected work of each client, by client number, in any unit.
        workers: the number of workers, ≥ 1; workers without a range are left out.
    """
    shares = longest_first([sum(work[client] for client in members) for members in ranges], workers)
    return tuple(tuple(client for part in share for client in ranges[part]) for share in shares)


def longest_first(work: Sequence[float], workers: int) -> tuple[tuple[int, ...], ...]:
    """Divide jobs among workers so that their expected work is similar.

    Jobs are assigned in descending order of work, each to the worker with the least work so far.
    With m workers, the busiest worker then has at most 4/3 - 1/(3 m) times the work that the
    busiest worker has in the best possible division.

    Args:
        work: the expected work of each job, by job number, in any unit.
        workers: the number of workers, ≥ 1; workers without a job are left out.

    Returns:
        The job numbers of each worker, ascending. They depend only on the arguments.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies", Theorem 2.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    shares: list[list[int]] = [[] for _ in range(min(workers, len(work)))]
    least = [(0.0, worker) for worker in range(len(shares))]
    for job in sorted(range(len(work)), key=lambda job: (-work[job], job)):
        load, worker = heapq.heappop(least)
        shares[worker].append(job)
        heapq.heappush(least, (load + work[job], worker))
    return tuple(tuple(sorted(share)) for share in shares)

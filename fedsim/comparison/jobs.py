"""Jobs of a comparison: one run for each variant and seed, done in worker processes.

A finished run is reused if the hash of everything that it depends on is unchanged. A crash of a
worker process fails only its current job.
"""

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch

import fedsim
from fedsim.comparison.load import LoadedComparison
from fedsim.comparison.worker import CLIENT_METRICS, RECORD, answer
from fedsim.core.durable import try_lock
from fedsim.core.plugin_sources import read_sources
from fedsim.core.python_objects import PythonObject
from fedsim.core.text_formats import is_finite
from fedsim.data.sources import load_dataset
from fedsim.experiment import LoadedExperiment
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import find_object
from fedsim.runs.inputs import objects_digest, package_version, private_digest

_PACKAGES = ("torch", "numpy", "scipy", "flwr", "scikit-learn")
_ROOMS = ("fedsim.accountant", "fedsim.clients", "fedsim.server")
_RESULTS = ("summary.json", "privacy.json", "scores.json", CLIENT_METRICS)  # read from each run
# Parts of fedsim/ that compute no run.
_COMPUTES_NO_RUN = ("cli", "comparison", "report", "tools", "tracking")


def run_fingerprint(loaded: LoadedExperiment) -> str:
    """Return the SHA-256 of everything that a run of the experiment depends on.

    Guarantee: the digest changes with every setting (defaults included, `name` and `runtime`
    excluded), every byte of a file that the experiment names, the sources of plug-ins and of
    fedsim, and the versions of the numeric libraries. Digests of files are keyed, so it reveals
    nothing of them.
    """
    experiment, base = loaded.experiment, loaded.base
    settings = experiment.model_dump(mode="json", exclude={"name", "runtime"})
    content = {
        "experiment": settings,
        "files": {
            name: _file_digest(path, path.stat().st_mtime_ns, path.stat().st_size)
            for name, path in sorted(_named_files(settings, base))
        },
        "plug-ins": read_sources(experiment.plugins, base=base).digest,
        **objects_digest(experiment),
        "fedsim": fedsim.__version__,
        "source": _source_digest(),
        "packages": {name: package_version(name) for name in _PACKAGES},
    }
    given = experiment.data.dataset
    if isinstance(given, PythonObject) and given.arrays is not None:
        dataset = load_dataset(experiment.data, seed=experiment.seed, base=base)
        parts = [part for part in (dataset.train, dataset.test) if part is not None]
        arrays = (array for part in parts for array in (part.features, part.targets))
        content["arrays"] = private_digest(arrays)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _named_files(settings: object, base: Path) -> Iterator[tuple[str, Path]]:
    """Yield (path as written, path) of every file that the settings name."""
    if isinstance(settings, dict | list):
        for value in settings.values() if isinstance(settings, dict) else settings:
            yield from _named_files(value, base)
    elif isinstance(settings, str) and settings and "\0" not in settings:
        path = base / os.path.expanduser(settings)
        if path.is_file():
            yield settings, path


@lru_cache(maxsize=256)
def _file_digest(path: Path, _modified: int, _size: int) -> str:
    return private_digest([np.fromfile(path, np.uint8)])  # it may have private examples


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Return a digest of the source code that computes runs, as one version may have several."""
    digest = hashlib.sha256()
    package = Path(fedsim.__file__).parent
    rooms = [Path(place) for name in _ROOMS for place in import_module(name).__path__]
    for root in (package, *rooms):
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if root != package or relative.parts[0] not in _COMPUTES_NO_RUN:
                digest.update(f"{root.name}/{relative.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


MARKER = "comparison.yaml"
FINISHED = ("completed", "stopped")


@dataclass(frozen=True)
class Job:
    """A job of a comparison: the run of one variant with one seed."""

    variant: str
    seed: int
    loaded: LoadedExperiment
    directory: Path
    digest: str  # by `run_fingerprint`
    action: Literal["reuse", "run", "resume"]  # `resume` continues after the last round
    measure: bool  # whether `client_metrics.json` must still be written

    @property
    def is_pending(self) -> bool:
        """Whether a worker still has work to do: to run the job, or to write client metrics."""
        return self.action != "reuse" or self.measure

    def to_message(self) -> dict[str, Any]:
        """Return the job as a mapping for a worker: JSON, unless it has Python objects."""
        mode = "python" if self.loaded.experiment.objects else "json"
        return {
            "action": self.action,
            "measure": self.measure,
            "experiment": self.loaded.experiment.model_dump(mode=mode),
            "base": str(self.loaded.base),
            "directory": str(self.directory.absolute()),
            "record": {"variant": self.variant, "seed": self.seed, "fingerprint": self.digest},
        }


def check_directory(out: Path, *, of_runs: bool = False) -> None:
    """Refuse a directory that is not new, empty, or that of a comparison of the same kind."""
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out} is a file; choose another --out")
    marker = out / MARKER
    holds_runs = marker.is_file() and "\nruns:" in marker.read_text(encoding="utf-8")
    if out.is_dir() and any(out.iterdir()) and not (holds_runs if of_runs else marker.is_file()):
        kind = "comparison of runs" if of_runs else "comparison"
        raise RunDirectoryError(f"{out} is not empty and holds no {kind}; choose another --out")
    if holds_runs and not of_runs:
        raise RunDirectoryError(f"{out} holds a comparison of given runs; choose another --out")
    for record in sorted(out.glob(f"*/*/*/{RECORD}")):  # superseded runs are counted, too
        RunDirectory.open(record.parent).read_json(RECORD)


@contextmanager
def lock_directory(out: Path) -> Iterator[tuple[int, ...]]:
    """Lock a comparison's directory, so that no second comparison writes into the same runs.

    The lock ends with the processes that hold it, however they end. Workers must inherit the
    yielded file descriptors, so that a worker that briefly outlives a killed caller keeps the lock.
    Platforms without file locks have no lock.
    """
    with (out / ".lock").open("w") as file:
        if not try_lock(file.fileno()):
            raise RunDirectoryError(
                f"another fedsim compare is running in {out}; wait for it or choose another --out"
            )
        yield (file.fileno(),) if os.name == "posix" else ()


def plan_jobs(comparison: LoadedComparison, out: Path) -> list[Job]:
    """Return the jobs of a comparison, one for every seed and variant, ordered by seed.

    If an experiment has changed since its earlier run, the directory of the earlier run is moved to
    `superseded/`. That directory is not deleted, since its ledger records the spent privacy budget.
    """
    jobs = []
    for seed in comparison.seeds:
        for variant in comparison.variants:
            loaded = variant.with_seed(seed)
            path = out / "runs" / variant.name / f"seed-{seed}"
            digest, action = run_fingerprint(loaded), "run"
            if find_object(path / RECORD).get("fingerprint") == digest:
                found = [find_object(path / name) for name in _RESULTS]
                is_whole = found[0].get("status") in FINISHED and is_finite(found)
                action = "reuse" if is_whole else "resume"
            elif path.exists():
                parent = out / "superseded" / variant.name
                parent.mkdir(parents=True, exist_ok=True)
                targets = (parent / f"{path.name}-{number}" for number in count(1))
                os.replace(path, next(target for target in targets if not target.exists()))
            missing = action != "reuse" or not (path / CLIENT_METRICS).is_file()
            measure = comparison.settings.client_metrics and missing
            jobs.append(Job(variant.name, seed, loaded, path, digest, action, measure))
    return jobs


MessageHandler = Callable[[int, Mapping[str, Any]], None]

MAX_WORKERS = 16
_GRACE_SECONDS = 60.0  # for interrupted runs to write their files
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def default_workers() -> int:
    """Return the default number of workers: one per usable processor, at most `MAX_WORKERS`."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every platform
    available = (os.cpu_count() or 1) if usable is None else len(usable(0))
    return min(available, MAX_WORKERS)


def execute(
    jobs: Sequence[Mapping[str, Any]],
    *,
    workers: int,
    log: Path,
    on_message: MessageHandler,
    inherited: tuple[int, ...] = (),
) -> None:
    """Run all jobs in `workers` parallel, single-threaded processes; `log` has their output.

    `on_message` is called in this thread with (index of the job, message); the last message of a
    job is `finished` or `failed`. The file descriptors `inherited` stay open in the workers. After
    a KeyboardInterrupt, all workers have ended and written their files.
    """
    if jobs:
        with log.open("ab") as errors:
            pool = _WorkerPool(deque(enumerate(jobs)), errors, on_message, inherited)
            pool.work(min(workers, len(jobs)))


def execute_here(
    jobs: Sequence[Mapping[str, Any]], *, log: Path, on_message: MessageHandler
) -> None:
    """Run all jobs of a comparison in the calling process, one after another, as `execute` does.

    A worker process has no copy of the Python objects that data or model may be.
    """
    threads = torch.get_num_threads()
    try:
        with log.open("a", encoding="utf-8") as errors, redirect_stderr(errors):
            for index, job in enumerate(jobs):
                ended = answer(job, partial(on_message, index))
                if ended.get("status") == "interrupted":
                    raise KeyboardInterrupt
    finally:
        torch.set_num_threads(threads)


_JobMessage = tuple[int, Mapping[str, Any]]  # index of the job, and its message


@dataclass
class _WorkerPool:
    """One thread per worker process feeds it jobs; the caller's thread does all else."""

    jobs: deque[_JobMessage]
    errors: IO[bytes]
    on_message: MessageHandler
    inherited: tuple[int, ...]
    _inbox: queue.Queue[_JobMessage | None] = field(default_factory=queue.Queue)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _running: int = 0
    _stopping: bool = False

    def work(self, workers: int) -> None:
        """Run all jobs in worker processes, and return when every job is done."""
        try:
            for _ in range(workers):
                self._start()
            self._tell(None)
        except KeyboardInterrupt:  # wait for the files of all runs; a second one does not wait
            self._stopping = True
            for process in self._processes:
                # Workers are not in the terminal's process group: only this signal reaches them.
                process.send_signal(signal.SIGINT)
            self._tell(time.monotonic() + _GRACE_SECONDS)
            raise
        finally:
            for process in self._processes:
                process.kill()

    def _start(self) -> None:
        """Start a worker process, and the thread that feeds it."""
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedsim.comparison.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            pass_fds=self.inherited,
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": paths},
        )
        self._processes.append(process)
        self._running += 1
        threading.Thread(target=self._serve, args=(process,), daemon=True).start()

    def _tell(self, deadline: float | None) -> None:
        """Pass on messages until all processes have ended; another one follows if one died."""
        with suppress(queue.Empty):
            while self._running:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                if (message := self._inbox.get(timeout=wait)) is not None:
                    self.on_message(*message)
                    continue
                self._running -= 1
                if self.jobs and not self._stopping:
                    self._start()

    def _serve(self, process: subprocess.Popen[str]) -> None:
        try:
            # Leaving closes the pipe of the process, which ends it; a dead one has broken pipes.
            with suppress(IndexError, OSError), process:
                while not self._stopping and process.poll() is None:
                    self._do(process, *self.jobs.popleft())
        finally:
            self._inbox.put(None)

    def _do(self, process: subprocess.Popen[str], index: int, job: Mapping[str, Any]) -> None:
        if process.stdin is None or process.stdout is None:
            raise TypeError("a worker needs pipes")
        with suppress(OSError):  # the pipe broke: the process is gone
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                self._inbox.put((index, message))
                if message["event"] in ("finished", "failed"):
                    return
        code = process.wait()
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        ended = {"event": "finished", "status": "interrupted"}
        died = {"event": "failed", "reason": f"its process died ({ending}); the log has more"}
        self._inbox.put((index, ended if self._stopping else died))

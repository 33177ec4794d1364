"""Worker processes that share a list of jobs; a crash fails only the crashed worker's job."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MessageHandler = Callable[[int, Mapping[str, Any]], None]

MAX_WORKERS = 16
_GRACE_SECONDS = 60.0  # for interrupted runs to write their files
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def default_workers() -> int:
    """Return the number of processors that this process may use, at most `MAX_WORKERS`."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        available = os.cpu_count() or 1
    return min(available, MAX_WORKERS)


def execute(
    jobs: Sequence[Mapping[str, Any]],
    *,
    workers: int,
    log: Path,
    on_message: MessageHandler,
    inherited: tuple[int, ...] = (),
) -> None:
    """Run every job in one of `workers` single-threaded processes.

    Args:
        jobs: messages for `fedsim.comparison.execution.worker`.
        workers: number of parallel processes.
        log: file that receives all output of the workers.
        on_message: called in this thread with the index of a job and each message of its worker.
            The last message of a job is `finished` or `failed`.
        inherited: file descriptors that stay open in the workers.

    Raises:
        KeyboardInterrupt: the user interrupted; all workers have ended and written their files.
    """
    if jobs:
        with log.open("ab") as errors:
            _WorkerPool(jobs, min(workers, len(jobs)), errors, on_message, inherited).work()


class _WorkerPool:
    """One thread per worker process feeds it jobs; the caller's thread handles the messages."""

    def __init__(
        self,
        jobs: Sequence[Mapping[str, Any]],
        workers: int,
        errors: IO[bytes],
        on_message: MessageHandler,
        inherited: tuple[int, ...],
    ) -> None:
        self._jobs = deque(enumerate(jobs))
        self._inbox: queue.Queue[tuple[int, Mapping[str, Any]] | None] = queue.Queue()
        self._errors = errors
        self._on_message = on_message
        self._inherited = inherited
        self._stopping = False
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]

    def work(self) -> None:
        """Return when every job is done."""
        for thread in self._threads:
            thread.start()
        try:
            self._tell(len(self._threads), None)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._end()

    def _tell(self, running: int, deadline: float | None) -> None:
        while running:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._inbox.get(timeout=wait)
            except queue.Empty:
                return
            if message is None:
                running -= 1
            else:
                self._on_message(*message)

    def _interrupt(self) -> None:
        """Interrupt every run and wait for its files; a second interrupt does not wait."""
        with self._lock:
            self._stopping = True
            processes = list(self._processes)
        for process in processes:
            # Workers are not in the terminal's process group: only this signal reaches them.
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _GRACE_SECONDS
        self._tell(sum(thread.is_alive() for thread in self._threads), deadline)

    def _end(self) -> None:
        with self._lock:
            self._stopping = True
            processes = list(self._processes)
        for process in processes:
            process.kill()

    def _serve(self) -> None:
        process: subprocess.Popen[str] | None = None
        try:
            while (job := self._next()) is not None:
                if process is None or process.poll() is not None:
                    process = self._start()
                if process is None:
                    return
                self._do(process, *job)
        finally:
            if process is not None:
                _dismiss(process)
                with self._lock:
                    self._processes.discard(process)
            self._inbox.put(None)

    def _next(self) -> tuple[int, Mapping[str, Any]] | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs and not self._stopping else None

    def _start(self) -> subprocess.Popen[str] | None:
        """Start a process; None once the pool is stopping, which would not end it."""
        paths = [path or os.getcwd() for path in sys.path]
        one_thread = dict.fromkeys(_ONE_THREAD, "1")
        with self._lock:
            if self._stopping:
                return None
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedsim.comparison.execution.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                pass_fds=self._inherited,
                env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(paths)},
            )
            self._processes.add(process)
        return process

    def _do(self, process: subprocess.Popen[str], index: int, job: Mapping[str, Any]) -> None:
        if process.stdin is None or process.stdout is None:
            raise TypeError("a worker needs pipes")
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                self._inbox.put((index, message))
                if message["event"] in ("finished", "failed"):
                    return
        except OSError:  # the pipe broke: the process is gone
            pass
        code = process.wait()
        with self._lock:
            self._processes.discard(process)
            stopping = self._stopping
        reason = f"its process died ({_ending(code)}); the log has more"
        ended = {"event": "finished", "status": "interrupted"}
        died = {"event": "failed", "reason": reason}
        self._inbox.put((index, ended if stopping else died))


def _dismiss(process: subprocess.Popen[str]) -> None:
    """Close the worker's input, so that it ends, and wait for it."""
    if process.stdin is not None:
        with suppress(OSError):  # the process is already gone
            process.stdin.close()
    process.wait()


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"

"""The lock that lets only one process write a run directory, for the whole run.

Two processes would mix their checkpoints, and could open secure sums of two sets of clients. The
lock ends with the process that holds it, even if the process is killed.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from fedsim.core.durable import name_file
from fedsim.core.errors import ExitCode
from fedsim.core.text_formats import parse_json
from fedsim.runs.files import DamagedRunError, RunDirectoryError

LOCK = "checkpoint/lock"


class RunInUseError(RunDirectoryError):
    """Error of a run directory that another process writes; the message names that process."""

    exit_code = ExitCode.FAILED


class RunLock:
    """The lock of a run directory, held until `release`.

    Guarantee: between construction and `release` no other process of this machine holds the lock.

    Args:
        run: the run directory.

    Raises:
        RunInUseError: another process holds the lock.
        DamagedRunError: the directory has no `checkpoint`.
        OSError: the lock file cannot be created.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedRunError.of(self._path.parent, "the directory is missing") from None
            if not try_lock(descriptor):
                os.close(descriptor)
                raise RunInUseError(_in_use(run))
            if _is_at(descriptor, self._path):
                break
            os.close(descriptor)  # its holder removed it between the two calls
        self._descriptor: int | None = descriptor
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = {"pid": os.getpid(), "host": platform.node(), "started": started}
        with name_file(self._path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{json.dumps(content)}\n".encode(), 0)

    def follow(self, run: Path) -> None:
        """Take over the new path `run` after the run directory was renamed."""
        self._path = run / LOCK

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, and the lock file is still in the run directory."""
        return self._descriptor is not None and _is_at(self._descriptor, self._path)

    def release(self) -> None:
        """Remove the lock file and release the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        if self.is_held:
            with suppress(OSError):  # a lock file without a holder is no obstacle
                self._path.unlink()
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)


@contextmanager
def hold_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run directory during the body of a `with` statement.

    Raises:
        RunInUseError: another process holds the lock.
        DamagedRunError: the directory has no `checkpoint`.
    """
    lock = RunLock(run)
    try:
        yield
    finally:
        lock.release()


def refuse_in_use(run: Path) -> None:
    """Check that no process is writing a run directory; no file is created.

    Raises:
        RunInUseError: a process is writing there; the message names the process.
    """
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not try_lock(descriptor, shared=True):
            raise RunInUseError(_in_use(run))
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Try to lock a file without waiting, and return whether the file is now locked.

    Where file locks do not exist (Windows), the result is True.

    Args:
        descriptor: file descriptor of the file.
        shared: whether other processes may hold a shared lock at the same time.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the file at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _in_use(run: Path) -> str:
    try:
        holder = parse_json((run / LOCK).read_text())
        who = "process {pid} on {host}, since {started}".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or was just removed
        who = "another process"
    return (
        f"{run} is in use by {who}: one process writes a run directory; wait for it, or choose "
        "another --out"
    )

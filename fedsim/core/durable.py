"""Files that survive a crash: appending, atomic replacement, locks, and hash-chained records.

A chained record is a JSON object with `previous`, the hash of the previous record, or `GENESIS`.
The hash of a record is the SHA-256 of the object as JSON with sorted keys and no spaces. A file of
a `ChainedFile` has the object, with its hash as `hash`, in this form on one line.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedsim.core.errors import FedsimError

GENESIS = "0" * 64
"""The value of `previous` in the first record of a chain."""


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that the `with` block raises, if the error lacks it.

    Args:
        path: the file that the `with` block reads or writes.

    Raises:
        OSError: the error of the `with` block, with `filename` set.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, which does not depend on the order of its keys."""
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def append(file: BinaryIO, data: bytes, *, at: int | None = None) -> None:
    """Append data to an open file and force it to disk.

    Args:
        file: the file, open for appending.
        data: the complete lines to append.
        at: number of bytes in complete lines so far. The file is first truncated to that length,
            which removes an incomplete line left by a crash. None truncates nothing.

    Raises:
        OSError: writing fails; it is unknown how much of the data is on disk.
    """
    if at is not None:
        file.truncate(at)
        file.seek(0, os.SEEK_END)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def chained_line(content: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """Return a record as a line of a chained file, and the hash of the record.

    Args:
        content: the record, without `previous` and `hash`.
        previous: hash of the previous record.
    """
    digest = digest_of(chained := {**content, "previous": previous})
    return _canonical({**chained, "hash": digest}) + "\n", digest


class ChainedFile:
    """An append-only file of chained records, which only one process at a time may use.

    Guarantee: when `append` returns, its record is on disk. A record that a crash cut short was
    followed by no action; the next `append` removes it.

    Args:
        path: the file; the first `append` creates it.
        raises: class of the error of a changed file.

    Attributes:
        records: the records without `previous` and `hash`, oldest first.
        heads: `GENESIS`, then the hash of each record.

    Raises:
        FedsimError: a line is no record, was changed, or does not continue the chain; the class is
            `raises`, and the message names the line.
    """

    def __init__(self, path: Path, *, raises: type[FedsimError]) -> None:
        self._path, self._size = path, 0
        self.records, self.heads = list[dict[str, Any]](), [GENESIS]
        *lines, _unfinished = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                content: dict[str, Any] = json.loads(line)
                previous, _digest = content.pop("previous"), content.pop("hash")
                expected, digest = chained_line(content, previous)
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise raises(f"{where}: not a record: {error!r}") from error
            if expected.encode() != line + b"\n":
                raise raises(f"{where}: the record was changed after it was written")
            if previous != self.heads[-1]:
                raise raises(f"{where}: the record does not continue the chain")
            self._remember(content, digest, len(line) + 1)

    def append(self, content: Mapping[str, Any]) -> None:
        """Append a record, without `previous` and `hash`, and force it to disk.

        Raises:
            OSError: writing fails; the error names the file.
        """
        line, digest = chained_line(content, self.heads[-1])
        with name_file(self._path), self._path.open("a+b") as file:
            append(file, line.encode(), at=self._size)
        self._remember(content, digest, len(line))

    def _remember(self, content: Mapping[str, Any], digest: str, size: int) -> None:
        self.records.append(dict(content))
        self.heads.append(digest)
        self._size += size


def replace_file(
    path: Path, data: bytes, *, open_new: Callable[[Path], BinaryIO] = lambda new: new.open("wb")
) -> None:
    """Replace a file atomically and force its content and name to disk.

    Args:
        path: the file; replaced if it exists.
        data: the new content of the file.
        open_new: function that creates and opens the temporary file, which is then renamed to
            `path`.

    Raises:
        OSError: writing fails; the error names the file, whose old content stays.
    """
    new = path.with_name(f".{path.name}.tmp")
    with name_file(path):
        with open_new(new) as file:
            append(file, data)
        os.replace(new, path)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force the file names of a directory to disk, if the platform can open directories.

    Raises:
        OSError: the disk failed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows; or a directory that may be written and not listed
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(file: BinaryIO) -> Iterator[None]:
    """Lock an open file against other processes while the `with` block runs.

    The end of the process releases the lock. Platforms without file locks (Windows) do not lock.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Try to lock an open file without waiting, and return whether the file is now locked.

    Other processes may hold a `shared` lock at the same time. Where file locks do not exist
    (Windows), the result is True.
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

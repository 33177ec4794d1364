"""Files that survive a crash: appending, atomic replacement, locks, and hash-chained records.

A chained record is a JSON object with `previous`, the hash of the previous record, or `GENESIS`.
The hash of a record is the SHA-256 of the object as JSON with sorted keys and no spaces.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

GENESIS = "0" * 64
"""The value of `previous` in the first record of a chain."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, which does not depend on the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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
        OSError: writing fails; the old content stays.
    """
    new = path.with_name(f".{path.name}.tmp")
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

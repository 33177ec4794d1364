"""Files that survive a crash: appended lines, whole replacements, names and locks; chained records.

A record of a chain is a JSON object with `previous`, the hash of the record before it or `GENESIS`.
Its own hash is the SHA-256 of the object as JSON with sorted keys and no spaces.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

GENESIS = "0" * 64
"""`previous` of the first record of a chain."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, whatever its whitespace and the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def append(file: BinaryIO, data: bytes, *, at: int | None = None) -> None:
    """Append to an open file; when this returns, the data is on disk.

    Args:
        file: open for appending.
        data: whole lines.
        at: bytes of whole lines so far: what a crash left behind them is removed; None: nothing is.

    Raises:
        OSError: the disk refuses; nobody can tell how much is on it.
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
    """Write a file, whole or not at all; when this returns, content and name are on disk.

    Args:
        path: the file; replaced if it exists.
        data: its content.
        open_new: creates the file that takes its place.

    Raises:
        OSError: the disk refuses; the old content stays.
    """
    new = path.with_name(f".{path.name}.tmp")
    with open_new(new) as file:
        append(file, data)
    os.replace(new, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force new file names to disk; platforms that cannot open a directory go without.

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
    """Hold an open file against other processes, until the process ends at the latest.

    Without file locks (Windows), there is one process.
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

"""Files of a node: for its user alone, written whole, and changed by one process at a time."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedsim.core.durable import exclusive as hold
from fedsim.core.durable import replace_file
from fedsim.core.errors import InputError


class DeploymentError(InputError):
    """A deployment cannot start or continue; the message is one line with the fix."""


_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOCK = "lock"


def private_directory(path: Path) -> None:
    """Create a directory if there is none, and check that only its user can open it.

    Raises:
        DeploymentError: it cannot be created, or other users can open it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be created: {error.strerror}") from error
    refuse_open(path, "700")


def private_file(path: Path) -> None:
    """Create an empty file if there is none, and check that only its user can open it.

    Raises:
        DeploymentError: it cannot be created, or other users can open it.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be created: {error.strerror}") from error
    refuse_open(path, "600")


def refuse_open(path: Path, wanted: str) -> None:
    """Check that a file or directory belongs to this user and is closed to others.

    Args:
        path: the file or directory.
        wanted: mode that the message recommends.

    Raises:
        DeploymentError: it belongs to another user, or other users can open it.
    """
    if sys.platform == "win32":  # access control lists, no mode bits
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise DeploymentError(
            f"{path} belongs to user {found.st_uid}, and this node runs as {os.geteuid()}: "
            "a client's state must be its own"
        )
    if found.st_mode & _OTHERS:
        raise DeploymentError(
            f"{path} can be opened by other users (mode {stat.S_IMODE(found.st_mode):o}): "
            f"chmod {wanted} {path}"
        )


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a directory of the node against its other processes.

    The lock ends with the process, however the process ends. Without file locks (Windows), there
    is one process.
    """
    private_file(directory / _LOCK)
    with (directory / _LOCK).open("r+b") as file, hold(file):
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all; when this returns, it is on disk.

    Args:
        path: the file, in a directory that the caller holds (`exclusive`).
        text: its content.
    """
    replace_file(path, text.encode(), open_new=_open_private)


def _open_private(path: Path) -> BinaryIO:
    """Create a file that only its user can open."""
    path.unlink(missing_ok=True)  # of a crash before it got its name
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

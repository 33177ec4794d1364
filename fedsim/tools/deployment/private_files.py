"""Private files of a node, which only its user can open: atomic writes, and locks."""

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedsim.core.durable import exclusive as hold
from fedsim.core.durable import replace_file
from fedsim.core.errors import InputError


class DeploymentError(InputError):
    """Error of a deployment that cannot start or continue; the message is one line with the fix."""


_LOCK = "lock"


def configured_path(node_config: Mapping[str, object], key: str) -> Path | None:
    """Return the path in a node's configuration, else in the variable FEDSIM_KEY, else None.

    Raises:
        DeploymentError: the path is not absolute; the working directory of a Flower process is
            seldom the user's.
    """
    variable = f"FEDSIM_{key.upper()}"
    given = {f"{key} in --node-config": node_config.get(key), variable: os.environ.get(variable)}
    for name, value in given.items():
        if value is not None:
            path = Path(os.path.expanduser(str(value)))
            if not path.is_absolute():
                raise DeploymentError(f"{name}: must be an absolute path, got {value!r}")
            return path
    return None


def private_directory(path: Path) -> None:
    """Create a directory if it does not exist, and check that only its user can open it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be created: {error.strerror}") from error
    refuse_open(path, "700")


def private_file(path: Path) -> None:
    """Create an empty file if it does not exist, and check that only its user can open it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be created: {error.strerror}") from error
    refuse_open(path, "600")


def refuse_open(path: Path, wanted: str) -> None:
    """Check that a file or directory belongs to this user and that no one else can open it."""
    foreign = ", and this node runs as {user}: a client's state must be its own"
    _check_access(path, stat.S_IRWXG | stat.S_IRWXO, "opened", wanted, foreign)


def refuse_writable(path: Path) -> None:
    """Check that only this user or root can change a file of the node's operator."""
    foreign = ": a policy must belong to root or to user {user}, as which this node runs"
    _check_access(path, stat.S_IWGRP | stat.S_IWOTH, "changed", "600", foreign, 0)


def _check_access(
    path: Path, forbidden: int, verb: str, wanted: str, foreign: str, *owners: int
) -> None:
    """Check the owner (this user or one of `owners`) and the mode bits of a file or directory."""
    if sys.platform == "win32":  # access control lists, no mode bits
        return
    status, user = path.stat(), os.geteuid()
    if status.st_uid not in (user, *owners):
        raise DeploymentError(f"{path} belongs to user {status.st_uid}" + foreign.format(user=user))
    if status.st_mode & forbidden:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        raise DeploymentError(
            f"{path} can be {verb} by other users (mode {mode}): chmod {wanted} {path}"
        )


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes of the node; Windows has no such locks."""
    private_file(directory / _LOCK)
    with (directory / _LOCK).open("r+b") as file, hold(file):
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a private file in a locked directory atomically; on return, it is on disk."""
    replace_file(path, text.encode(), open_new=_open_private)


def _open_private(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)  # of a crash before it got its name
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

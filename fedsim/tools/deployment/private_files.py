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


def configured_path(node_config: Mapping[str, object], key: str) -> Path | None:
    """Return the path in a node's configuration, else in the variable FEDSIM_KEY, else None.

    It must be absolute: the working directory of a Flower process is seldom the user's.
    """
    variable = f"FEDSIM_{key.upper()}"
    given = {f"{key} in --node-config": node_config.get(key), variable: os.environ.get(variable)}
    for name, value in given.items():
        if value is not None:
            return absolute_path(name, value)
    return None


def absolute_path(name: str, value: object, where: str = "") -> Path:
    """Return a path that must be absolute, or begin with ~; the error names it and its machine."""
    path = Path(os.path.expanduser(str(value)))
    if not path.is_absolute():
        raise DeploymentError(f"{name}: must be an absolute path{where}, got {value!r}")
    return path


def make_private(path: Path, *, is_directory: bool = False) -> None:
    """Create an empty file or a directory, unless it exists; only its user may open it."""
    try:
        if is_directory:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be created: {error.strerror}") from error
    refuse_open(path)


def refuse_open(path: Path, *, is_policy: bool = False) -> None:
    """Check that only this user can open a file or directory.

    A policy may belong to root and be read by all: only this user or root can change it.
    """
    if sys.platform == "win32":  # access control lists, no mode bits
        return
    status, user = path.stat(), os.geteuid()
    owners, forbidden, verb = (user,), stat.S_IRWXG | stat.S_IRWXO, "opened"
    rule = f", and this node runs as {user}: a client's state must be its own"
    if is_policy:
        owners, forbidden, verb = (user, 0), stat.S_IWGRP | stat.S_IWOTH, "changed"
        rule = f": a policy must belong to root or to user {user}, as which this node runs"
    if status.st_uid not in owners:
        raise DeploymentError(f"{path} belongs to user {status.st_uid}{rule}")
    if status.st_mode & forbidden:
        mode, wanted = f"{stat.S_IMODE(status.st_mode):o}", "700" if path.is_dir() else "600"
        raise DeploymentError(
            f"{path} can be {verb} by other users (mode {mode}): chmod {wanted} {path}"
        )


@contextmanager
def exclusive(directory: Path, *, state: Path) -> Iterator[None]:
    """Create private directories from the node's state to this one, and lock this one.

    The lock holds against other processes of the node; on Windows only one may run.
    """
    for path in (*reversed(directory.parents), directory):
        if path.is_relative_to(state):
            make_private(path, is_directory=True)
    lock = directory / "lock"
    make_private(lock)
    with lock.open("r+b") as file, hold(file):
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a private file in a locked directory atomically; on return, it is on disk."""
    replace_file(path, text.encode(), open_new=_open_private)


def _open_private(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)  # of a crash before it got its name
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

"""Digests of private examples, under a key that stays outside of what is shared.

Whoever knows all examples but one can test each guess of the last one against a plain hash. The key
is a file of the user's own, made at the first run: digests of one user can be compared, and without
the key they are random numbers. It is in no run directory.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedsim.core.errors import StorageError, describe_os_error

_KEY_BYTES, _DIGEST_BYTES = 32, 32
PATTERN = "^[0-9a-f]{16}:[0-9a-f]{64}$"


def key_path() -> Path:
    """Return the file of the key: `fedsim/data.key` in $XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "fedsim" / "data.key"


def private_digest(arrays: Iterable[np.ndarray]) -> str:
    """Return a keyed BLAKE2b of arrays, their types and shapes; it begins with the key's own name.

    Guarantee: without the key, the digest is a pseudorandom function's value and tells nothing of
    the arrays. Under one key, equal digests mean equal arrays, up to a collision.

    Args:
        arrays: of any type and shape.

    Raises:
        StorageError: the key can neither be read nor written.
    """
    key = _key()
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)
    for array in arrays:
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return f"{_name_of(key)}:{state.hexdigest()}"


def have_one_key(one: str, other: str) -> bool:
    """Whether two digests are of one key, so that they can be compared."""
    return one.partition(":")[0] == other.partition(":")[0]


def _name_of(key: bytes) -> str:
    return hashlib.blake2b(b"name", digest_size=8, key=key).hexdigest()


def _key() -> bytes:
    """Return the key; the first call of all makes it, readable by its owner alone."""
    path = key_path()
    try:
        if not path.exists():
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"the key of digests of private data: {describe_os_error(error)}; set XDG_STATE_HOME "
            "to a folder of your own that can be written"
        ) from error
    if len(key) != _KEY_BYTES:
        raise StorageError(f"{path} is damaged: it has {len(key)} bytes, not {_KEY_BYTES}")
    return key


def _make(path: Path) -> None:
    """Make the key whole or not at all; of two processes, one does."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(os.urandom(_KEY_BYTES))
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()

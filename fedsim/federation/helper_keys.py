"""Long-term keys of helpers: generated once and read on the machine of each helper."""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedsim.secagg.errors import PublicKeyError
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.settings import SecureAggregationSettings

HELPER_KEY = "helper-key"  # key of a SuperNode's --node-config
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_helper_key(path: Path) -> IdentityKey:
    """Write a new key (PEM, PKCS 8), readable by its owner alone, and return it.

    Raises:
        FileExistsError: the file exists; a key that is overwritten is lost.
        OSError: the file cannot be written.
    """
    key = IdentityKey.generate()
    private = Ed25519PrivateKey.from_private_bytes(key.to_bytes())
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text)
    return key


def read_helper_key(path: Path) -> IdentityKey:
    """Return the key in a file.

    Raises:
        PublicKeyError: the file is missing, holds no Ed25519 key, or is readable by other users.
    """
    try:
        mode, text = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise PublicKeyError(
            f"the helper's key {path} cannot be read: {error.strerror}; generate one with "
            f"`fedsim helper-key {path}`"
        ) from error
    if sys.platform != "win32" and mode & _ACCESS_BY_OTHERS:
        raise PublicKeyError(f"the helper's key is readable by other users; run chmod 600 {path}")
    try:
        private = load_pem_private_key(text, password=None)
    except (ValueError, TypeError) as error:
        raise PublicKeyError(f"{path} is not a key of `fedsim helper-key`") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise PublicKeyError(f"{path} is not a key of `fedsim helper-key`: it is not Ed25519")
    return IdentityKey(private)


def identity_of_helper(
    settings: SecureAggregationSettings,
    helper: int,
    *,
    base: Path,
    node_config: Mapping[str, object],
) -> IdentityKey | None:
    """Return the long-term key of a helper, from its node or from the experiment; None without.

    Args:
        settings: the `secure_aggregation` section.
        helper: number of the helper, from 1.
        base: the directory in which relative paths of the experiment start.
        node_config: configuration of the helper's node; it names no key in a simulation.

    Raises:
        PublicKeyError: the key file cannot be used (see `read_helper_key`).
    """
    given = node_config.get(HELPER_KEY)
    if given is None and settings.helper_key_files:
        given = settings.helper_key_files[helper - 1]
    return None if given is None else read_helper_key(base / Path(str(given)).expanduser())

"""Lasting keys of helpers and clients: made once, and read on the machine of their owner."""

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

HELPER_KEY = "helper-key"  # keys of a SuperNode's --node-config
CLIENT_KEY = "client-key"
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_lasting_key(path: Path) -> IdentityKey:
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


def read_lasting_key(path: Path) -> IdentityKey:
    """Return the key in a file.

    Raises:
        PublicKeyError: the file is missing, holds no Ed25519 key, or is readable by other users.
    """
    try:
        mode, text = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise PublicKeyError(
            f"the lasting key {path} cannot be read: {error.strerror}; generate one with "
            f"`fedsim helper-key {path}` or `fedsim client-key {path}`"
        ) from error
    if sys.platform != "win32" and mode & _ACCESS_BY_OTHERS:
        raise PublicKeyError(f"the lasting key is readable by other users; run chmod 600 {path}")
    try:
        private = load_pem_private_key(text, password=None)
    except (ValueError, TypeError) as error:
        raise PublicKeyError(
            f"{path} is not a key of `fedsim helper-key` or `fedsim client-key`"
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise PublicKeyError(
            f"{path} is not a key of `fedsim helper-key` or `fedsim client-key`: not Ed25519"
        )
    return IdentityKey(private)


def identity_of_helper(
    settings: SecureAggregationSettings,
    helper: int,
    *,
    base: Path,
    node_config: Mapping[str, object],
) -> IdentityKey | None:
    """Return the lasting key of a helper, from its node or from the experiment; None without.

    Args:
        settings: the `secure_aggregation` section.
        helper: number of the helper, from 1.
        base: the directory in which relative paths of the experiment start.
        node_config: configuration of the helper's node; it names no key in a simulation.

    Raises:
        PublicKeyError: the key file cannot be used (see `read_lasting_key`).
    """
    given = node_config.get(HELPER_KEY)
    if given is None and settings.keys.helper_files:
        given = settings.keys.helper_files[helper - 1]
    return None if given is None else read_lasting_key(base / Path(str(given)).expanduser())


def identity_of_client(
    settings: SecureAggregationSettings,
    client: int,
    *,
    base: Path,
    node_config: Mapping[str, object] | None = None,
) -> IdentityKey | None:
    """Return the lasting key of a client, which helpers pin; None where no keys are pinned.

    Args:
        settings: the `secure_aggregation` section.
        client: number of the client, from 0.
        base: the directory in which relative paths of the experiment start.
        node_config: configuration of the client's node; it names no key in a simulation.

    Raises:
        PublicKeyError: the key file is missing or cannot be used (see `read_lasting_key`), or holds
            another key than the pinned one.
    """
    pins, files = settings.keys.client_fingerprints, settings.keys.client_files
    if not pins:
        return None
    given = (node_config or {}).get(CLIENT_KEY, files[client] if files else None)
    if given is None:
        raise PublicKeyError(
            f"client {client} has no lasting key, but keys.client_fingerprints pins "
            f"{pins[client][:16]}...; name its file: client-key in --node-config, or "
            "keys.client_files in a simulation"
        )
    key = read_lasting_key(base / Path(str(given)).expanduser())
    if key.fingerprint != pins[client]:
        raise PublicKeyError(
            f"the lasting key of client {client} has the fingerprint {key.fingerprint}, but "
            f"keys.client_fingerprints pins {pins[client]}; name the other file, or correct the "
            "pin everywhere"
        )
    return key

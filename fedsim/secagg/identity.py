"""Who a helper is, over many runs: a lasting key that signs the sealing key of each run.

Clients pin the lasting key. Seeds are sealed to a key of one run, so that a helper that forgets
what it answered (a restart, a new disk) also loses the key to what it answered: a lasting sealing
key would open the envelopes of an old run again, for another set of clients.
"""

import hashlib
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsim.secagg.context import pack
from fedsim.secagg.errors import PublicKeyError
from fedsim.secagg.messages import HelloReply

_PURPOSE = b"fedsim helper key 1"


class IdentityKey:
    """A lasting Ed25519 key (RFC 8032) of one helper."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Return a new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, private: bytes) -> Self:
        """Return the key with these 32 private bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(private))

    def to_bytes(self) -> bytes:
        """Return the 32 private bytes."""
        return self._private.private_bytes_raw()

    @property
    def fingerprint(self) -> str:
        """What clients pin."""
        return fingerprint(self.public)

    def sign(self, *, run_id: str, helper: int, params: str, public_key: bytes) -> bytes:
        """Return the signature of a helper's sealing key for one run."""
        return self._private.sign(_statement(run_id, helper, params, public_key))


def fingerprint(public: bytes) -> str:
    """Return the SHA-256 of a public key in hex, for pinning."""
    return hashlib.sha256(public).hexdigest()


def check_pinned(hello: HelloReply, pin: str, *, params: str, client: int) -> None:
    """Check that a helper's sealing key comes from the helper that a client has pinned.

    Guarantee: passes only for a key that the owner of the pinned key signed for this run, these
    parameters and this number of a helper.

    Args:
        hello: what the server says that the helper said.
        pin: fingerprint of the helper's lasting key.
        params: digest of the client's own settings.
        client: named in errors.

    Raises:
        PublicKeyError: another key, or a signature that is not of it.
    """
    if fingerprint(hello.identity) != pin:
        raise PublicKeyError(
            f"helper {hello.helper} shows the key {fingerprint(hello.identity)[:16]}..., but "
            f"{pin[:16]}... is pinned; the server may have put in its own. Ask whoever runs the "
            "helper, and correct helper_key_fingerprints only if they say so",
            client=client,
        )
    try:
        key = Ed25519PublicKey.from_public_bytes(hello.identity)
        statement = _statement(hello.run_id, hello.helper, params, hello.public_key)
        key.verify(hello.signature, statement)
    except (InvalidSignature, ValueError):
        raise PublicKeyError(
            f"the key of helper {hello.helper} for this run is not signed by its pinned key; the "
            "server may have put in its own. Nothing was uploaded",
            client=client,
        ) from None


def _statement(run_id: str, helper: int, params: str, public_key: bytes) -> bytes:
    """Return the bytes that are signed; different fields give different bytes."""
    return pack([_PURPOSE, run_id.encode(), str(helper).encode(), params.encode(), public_key])

"""Long-term ("lasting") identity keys of helpers and clients, which sign their messages.

A helper's lasting key signs the helper's sealing key of each run. Clients pin the lasting key and
encrypt their seeds for the sealing key of the run. A helper that loses its state (a restart, a new
disk) also loses the sealing key. This is intended: with a lasting sealing key the helper could open
the envelopes of an old run a second time, for another set of clients.

A client's lasting key signs each envelope that the client seals. Helpers pin the lasting keys of
all clients, so a helper counts only clients that exist. A server that makes up envelopes has no
signatures for them.
"""

import hashlib
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsim.secagg.context import pack
from fedsim.secagg.errors import PublicKeyError
from fedsim.secagg.messages import HelloReply

_PURPOSE = b"fedsim helper key 1"
_ENVELOPE_PURPOSE = b"fedsim client envelope 1"


class IdentityKey:
    """The long-term private key of a helper or client, for Ed25519 signatures (RFC 8032)."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Return a new key, made with randomness of the operating system."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, private: bytes) -> Self:
        """Return the key with the given 32 private bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(private))

    def to_bytes(self) -> bytes:
        """Return the 32 private bytes of the key."""
        return self._private.private_bytes_raw()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key in hex; other parties pin (store and compare) this value."""
        return key_fingerprint(self.public)

    def sign(self, *, run_id: str, helper: int, params: str, public_key: bytes) -> bytes:
        """Return a helper's signature of its sealing key for one run.

        Args:
            run_id: the name of the run.
            helper: the number of the helper, ≥ 1.
            params: the digest of the secure aggregation settings.
            public_key: the public sealing key, 32 bytes.
        """
        return self._private.sign(_statement(run_id, helper, params, public_key))

    def sign_envelope(self, envelope: bytes, *, info: bytes) -> bytes:
        """Return a client's signature for a sealed envelope.

        Args:
            envelope: the sealed seed for one helper.
            info: the `info` bytes of the seed, which name the client and the helper.
        """
        return self._private.sign(pack([_ENVELOPE_PURPOSE, info, envelope]))


def key_fingerprint(public: bytes) -> str:
    """Return the SHA-256 of a public key in hex, by which other parties recognise the key."""
    return hashlib.sha256(public).hexdigest()


def verify_helper_key(hello: HelloReply, pin: str, *, params: str, client: int) -> None:
    """Check that a sealing key comes from the helper whose long-term key a client has pinned.

    Guarantee: the check passes only for a key that the owner of the pinned key signed for this run,
    these parameters and this helper number.

    Args:
        hello: the helper's reply with the sealing key, as forwarded by the server.
        pin: the fingerprint of the helper's lasting key.
        params: the digest of the client's settings.
        client: the client that error messages name.

    Raises:
        PublicKeyError: the lasting key is not the pinned one, or the signature is wrong.
    """
    if key_fingerprint(hello.identity) != pin:
        raise PublicKeyError(
            f"helper {hello.helper} shows the key {key_fingerprint(hello.identity)[:16]}..., but "
            f"{pin[:16]}... is pinned; the server may have substituted its own key. Change "
            "keys.helper_fingerprints only if the helper's operator confirms the new key",
            client=client,
        )
    statement = _statement(hello.run_id, hello.helper, params, hello.public_key)
    if not _has_signed(hello.identity, statement, hello.signature):
        raise PublicKeyError(
            f"the key of helper {hello.helper} for this run is not signed by its pinned key; the "
            "server may have substituted its own key. Nothing was uploaded",
            client=client,
        )


def is_from_client(
    envelope: bytes, *, info: bytes, identity: bytes, signature: bytes, pin: str
) -> bool:
    """Whether an envelope has a valid signature, for `info`, of the client whose key is pinned.

    Args:
        envelope: the sealed seed.
        info: the `info` bytes of the seed, as the helper computes them.
        identity: the client's lasting public key, as forwarded by the server.
        signature: the client's signature, as forwarded by the server.
        pin: the fingerprint of the client's lasting key.
    """
    content = pack([_ENVELOPE_PURPOSE, info, envelope])
    return key_fingerprint(identity) == pin and _has_signed(identity, content, signature)


def _has_signed(identity: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the owner of a lasting public key signed the content."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(run_id: str, helper: int, params: str, public_key: bytes) -> bytes:
    """Return the bytes that a helper signs; different fields give different bytes."""
    return pack([_PURPOSE, run_id.encode(), str(helper).encode(), params.encode(), public_key])

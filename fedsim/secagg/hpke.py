"""Sealed envelopes (encrypted small secrets), by HPKE (RFC 9180) in base mode.

The cipher suite is X25519, HKDF-SHA256 and AES-256-GCM.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

try:
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
except ImportError:  # cryptography < 47; `check_hpke` reports it, plain averaging needs no HPKE
    _SUITE = None
else:
    _SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)

from fedsim.core.errors import InputError
from fedsim.secagg.errors import EnvelopeError, PublicKeyError

ENVELOPE_OVERHEAD_BYTES = 48  # encapsulated key, 32, and authentication tag, 16
_PROBE = X25519PrivateKey.from_private_bytes(bytes([1]) * 32)


class HpkeMissingError(InputError):
    """Raised if the installed package `cryptography` has no HPKE."""


def check_hpke() -> None:
    """Check that the installed package `cryptography` has HPKE.

    Raises:
        HpkeMissingError: the installed version of `cryptography` is too old.
    """
    _suite()


class SealingKey:
    """A private X25519 key that opens envelopes (secrets encrypted by HPKE).

    Guarantee: an envelope of `seal` opens only with the same key and the same `info`.
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Return a new key, made with randomness of the operating system."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, private: bytes) -> Self:
        """Return the key with the given 32 private bytes."""
        return cls(X25519PrivateKey.from_private_bytes(private))

    def to_bytes(self) -> bytes:
        """Return the 32 private bytes of the key."""
        return self._private.private_bytes_raw()

    def open(self, envelope: bytes, *, info: bytes, client: int | None = None) -> bytes:
        """Return the secret that an envelope contains.

        Args:
            envelope: the bytes that `seal` returned.
            info: the `info` bytes of the secret, as its sender computed them.
            client: the number of the sender, for error messages.

        Raises:
            EnvelopeError: the envelope is damaged, sealed to another key, or for another context.
        """
        try:
            return _suite().decrypt(envelope, self._private, info=info)
        except InvalidTag:
            raise EnvelopeError(
                "the envelope does not open: it was damaged, sealed to another key, or made for "
                "another run, round, model or client",
                client=client,
            ) from None


def seal(secret: bytes, public: bytes, *, info: bytes) -> bytes:
    """Return an envelope (encrypted secret) that only the owner of the key `public` can open.

    Args:
        secret: any bytes; the envelope is `ENVELOPE_OVERHEAD_BYTES` longer.
        public: the X25519 public key, 32 bytes.
        info: the `info` bytes of the secret, which are needed again to open the envelope.

    Raises:
        PublicKeyError: the key is malformed or of low order.
        HpkeMissingError: the installed version of `cryptography` is too old.
    """
    suite = _suite()
    try:
        return suite.encrypt(secret, X25519PublicKey.from_public_bytes(public), info=info)
    except ValueError:
        raise _unusable(public, None) from None


def load_public_key(public: bytes, *, owner: int | None = None) -> X25519PublicKey:
    """Return an X25519 public key as an object, after checking it.

    Args:
        public: the public key, 32 bytes.
        owner: the client that error messages name.

    Raises:
        PublicKeyError: the key does not have 32 bytes, or is of low order (every shared secret
            would be zero).
    """
    try:
        key = X25519PublicKey.from_public_bytes(public)
        _PROBE.exchange(key)
    except ValueError:
        raise _unusable(public, owner) from None
    return key


def agree(private: bytes, public: bytes, *, owner: int | None = None) -> bytes:
    """Return the 32-byte secret that two parties share by X25519 key agreement (RFC 7748).

    Args:
        private: the private key of one party, 32 bytes.
        public: the public key of the other party, 32 bytes.
        owner: the client that error messages name as the owner of `public`.

    Raises:
        PublicKeyError: the public key is malformed or of low order.
    """
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:
        raise _unusable(public, owner) from None


def _suite() -> "Suite":
    if _SUITE is None:
        raise HpkeMissingError(
            "secure_aggregation needs HPKE (RFC 9180), which came with cryptography 47; this is "
            f"{version('cryptography')}: pip install 'flwr>=1.40' 'cryptography>=47'"
        )
    return _SUITE


def _unusable(public: bytes, owner: int | None) -> PublicKeyError:
    return PublicKeyError(
        f"{bytes(public).hex() or 'nothing'} is no usable X25519 public key; "
        "it must have 32 bytes and not be of low order",
        client=owner,
    )


def check_distinct(keys: Iterable[bytes]) -> None:
    """Check that no public key occurs twice.

    Raises:
        PublicKeyError: a key occurs twice, so its owners would share their secrets.
    """
    seen: set[bytes] = set()
    for key in keys:
        if key in seen:
            raise PublicKeyError(
                f"the public key {key.hex()} occurs twice; each party needs its own"
            )
        seen.add(key)

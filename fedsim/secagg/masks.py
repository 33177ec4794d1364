"""Masks of secure aggregation: pairwise masks, which cancel in the sum, and self-masks.

A mask is a cipher's keystream that is added to a vector. Seeds come from the operating system.
Generators of numpy, torch and `random` are forbidden here, because their seeds are too short and
their output is predictable.

Client u uploads Y + PRG(b_u) + Σ_{v>u} PRG(s_uv) - Σ_{v<u} PRG(s_uv) for its payload Y. The secrets
s_uv come from a key agreement of clients u and v, and their masks cancel. The self-mask of seed b_u
protects an upload that arrives late: the server has then already recovered the s_uv, to remove the
pairwise masks of a client that seemed lost.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning".
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsim.core.streams import Keystream
from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.hpke import agree

SEED_BYTES = 32
Write = Callable[[memoryview], object]  # overwrites a buffer with the next bytes of a keystream

_BLOCK_BYTES = 1 << 17  # keystream and vector block stay in the cache
_ZEROS = memoryview(bytes(_BLOCK_BYTES))
_MAX_OPEN_STREAMS = 64  # cipher states held while a block of the vector is in the cache


def new_seed() -> bytes:
    """Return a new seed, 32 random bytes from the operating system."""
    return os.urandom(SEED_BYTES)


def derive_key(seed: bytes, info: bytes) -> bytes:
    """Return a 32-byte key that is derived from a seed by HKDF-SHA256 (RFC 5869).

    Args:
        seed: the input keying material, of any length.
        info: the `info` bytes; another value gives an independent key.
    """
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(seed)


class SeedExpander:
    """A keystream generator, which expands 32-byte keys to masks of any length.

    Guarantee: the mask of a key is a cipher's keystream, read as little-endian ring elements. The
    cipher is AES-256-CTR from counter block 2, as GCM encrypts under a zero nonce, or ChaCha20 from
    counter 0. Use each key once; `derive_key` with a unique `info` gives such keys.

    Args:
        algorithm: "aes256_ctr" (fast with AES instructions) or "chacha20".
    """

    def __init__(self, algorithm: Literal["aes256_ctr", "chacha20"] = "aes256_ctr") -> None:
        self.algorithm = algorithm

    def add_into(self, vector: Ring, keys: Iterable[bytes], *, subtract: bool = False) -> None:
        """Add the masks of keys to a vector, in place.

        The vector is processed piece by piece, with all masks for each piece. So the extra memory
        does not grow with the vector.

        Args:
            vector: ring elements (d,).
            keys: the 32-byte keys.
            subtract: whether the masks are subtracted instead.
        """
        pending = list(keys)
        for start in range(0, len(pending), _MAX_OPEN_STREAMS):
            group = [self._stream(key) for key in pending[start : start + _MAX_OPEN_STREAMS]]
            _add(vector, group, subtract=subtract)

    def _stream(self, key: bytes) -> Write:
        if len(key) != SEED_BYTES:
            raise ValueError(f"a key must have {SEED_BYTES} bytes, got {len(key)}")
        if self.algorithm == "aes256_ctr":
            return Keystream(key).write
        cipher = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
        return lambda into: cipher.update_into(_ZEROS[: len(into)], into)


def _add(vector: Ring, streams: Sequence[Write], *, subtract: bool) -> None:
    combine = np.subtract if subtract else np.add
    width = vector.dtype.itemsize
    step = _BLOCK_BYTES // width
    keystream = np.empty(min(step, len(vector)), vector.dtype.newbyteorder("<"))
    for start in range(0, len(vector), step):
        block = vector[start : start + step]
        mask = keystream[: len(block)]
        buffer = mask.view(np.uint8).data
        for write in streams:
            write(buffer)
            combine(block, mask, out=block)


@dataclass
class PairwiseMasks:
    """A collection of masks of one round, which are added to a vector in two passes.

    Args:
        context: the context of the round; the key of every mask depends on it.
        expander: the keystream generator of the masks.
    """

    context: RoundContext
    expander: SeedExpander
    _plus: list[bytes] = field(default_factory=list)
    _minus: list[bytes] = field(default_factory=list)

    def add_self_mask(self, client: int, seed: bytes, *, remove: bool = False) -> None:
        """Collect the self-mask of a client: the keystream of a seed that the client drew alone.

        The client adds the mask to its upload. The server, which learns the seed later, subtracts
        the same mask from the sum. `apply` does either.

        Args:
            client: number of the client that drew the seed.
            seed: seed of the self-mask, 32 bytes.
            remove: True for the server, False for the client itself.
        """
        info = self.context.info(purpose="self mask", sender=client, receiver=client)
        (self._minus if remove else self._plus).append(derive_key(seed, info))

    def add_pairwise_mask(self, client: int, private: bytes, peer: int, public: bytes) -> None:
        """Collect the pairwise mask of a client with another client; `apply` adds it.

        The masks of the two clients cancel in the sum. If one of the clients dropped out, the
        server adds the mask of the missing client itself.

        Args:
            client: the number of the client that owns the private key.
            private: the client's private masking key, 32 bytes.
            peer: the number of the other client.
            public: the peer's public masking key, 32 bytes.
        """
        low, high = min(client, peer), max(client, peer)
        info = self.context.info(purpose="pairwise mask", sender=low, receiver=high)
        key = derive_key(agree(private, public, owner=peer), info)
        (self._plus if client == low else self._minus).append(key)

    def apply(self, vector: Ring) -> None:
        """Apply the collected masks to a vector, in place, and empty the collection.

        Each mask is added or subtracted, as it was collected.
        """
        self.expander.add_into(vector, self._plus)
        self.expander.add_into(vector, self._minus, subtract=True)
        self._plus, self._minus = [], []


def commitment(context: RoundContext, client: int, seed: bytes) -> bytes:
    """Return a commitment to a self-mask seed, a 32-byte hash that hides the random seed.

    Args:
        context: the context of the round.
        client: the number of the client that owns the seed.
        seed: the seed, 32 bytes.
    """
    info = context.info(purpose="self mask commitment", sender=client, receiver=0)
    return derive_key(seed, info)


def secret_share_info(context: RoundContext, sender: int, receiver: int) -> bytes:
    """Return the `info` bytes that bind an envelope with secret shares to its round and clients.

    Args:
        context: the context of the round.
        sender: the number of the client that owns the secrets.
        receiver: the number of the client that holds the shares.
    """
    return context.info(purpose="secret shares", sender=sender, receiver=receiver)


def masked_info(context: RoundContext, client: int) -> bytes:
    """Return the `info` bytes that bind a masked payload to its round and client.

    Args:
        context: the context of the round.
        client: the number of the client that sends the payload.
    """
    return context.info(purpose="masked payload", sender=client, receiver=0)

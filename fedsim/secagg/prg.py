"""Pseudorandom generator of masks: a cipher's keystream, added to a vector block by block.

Seeds come from the operating system. Generators of numpy, torch and `random` are forbidden here:
their seeds are too short and their output is predictable.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsim.secagg.encoding import Ring

SEED_BYTES = 32
_Keystream = CipherContext | AEADEncryptionContext

_BLOCK_BYTES = 1 << 17  # keystream and vector block stay in the cache
_ZEROS = bytes(_BLOCK_BYTES)
_MAX_OPEN_STREAMS = 64  # cipher states held while a block of the vector is in the cache


def new_seed() -> bytes:
    """Return 32 bytes of the operating system's randomness."""
    return os.urandom(SEED_BYTES)


def derive_key(seed: bytes, info: bytes) -> bytes:
    """Return a 32-byte key: HKDF-SHA256 of `seed` (RFC 5869).

    Args:
        seed: input keying material, of any length.
        info: context of the key.
    """
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(seed)


class SeedExpander:
    """Expands 32-byte keys to masks of any length and adds them to a vector in place.

    Guarantee: the mask of a key is its cipher's keystream, read as little-endian ring elements:
    AES-256-CTR from counter block 2, as GCM encrypts under a zero nonce; or ChaCha20 from counter
    0. Use each key once; `derive_key` with a unique `info` gives such keys.

    Args:
        algorithm: "aes256_ctr" (fast with AES instructions) or "chacha20".
    """

    def __init__(self, algorithm: Literal["aes256_ctr", "chacha20"] = "aes256_ctr") -> None:
        self.algorithm = algorithm

    def add_into(self, vector: Ring, keys: Iterable[bytes], *, subtract: bool = False) -> None:
        """Add the masks of keys to a vector, in place.

        Each block of the vector is in the cache while all keys are applied to it. Memory beside the
        vector is O(1).

        Args:
            vector: ring elements (d,).
            keys: 32-byte keys.
            subtract: subtract the masks instead.
        """
        pending = list(keys)
        for start in range(0, len(pending), _MAX_OPEN_STREAMS):
            group = [self._stream(key) for key in pending[start : start + _MAX_OPEN_STREAMS]]
            _add(vector, group, subtract=subtract)

    def expand(self, key: bytes, length: int, dtype: np.dtype) -> Ring:
        """Return the mask of a key.

        Args:
            key: 32 bytes.
            length: number of ring elements.
            dtype: type of ring elements, uint32 or uint64.
        """
        mask = np.zeros(length, dtype)
        self.add_into(mask, [key])
        return mask

    def _stream(self, key: bytes) -> _Keystream:
        if len(key) != SEED_BYTES:
            raise ValueError(f"a key must have {SEED_BYTES} bytes, got {len(key)}")
        if self.algorithm == "aes256_ctr":
            # The counter mode inside GCM: OpenSSL has wider instructions for it than for plain CTR,
            # and computes it more than twice as fast where the processor has them.
            return Cipher(AES(key), GCM(bytes(12))).encryptor()
        return Cipher(ChaCha20(key, bytes(16)), None).encryptor()


def _add(vector: Ring, streams: Sequence[_Keystream], *, subtract: bool) -> None:
    combine = np.subtract if subtract else np.add
    width = vector.dtype.itemsize
    step = _BLOCK_BYTES // width
    buffer = bytearray(min(_BLOCK_BYTES, len(vector) * width) + 16)
    keystream = np.frombuffer(buffer, vector.dtype.newbyteorder("<"), len(buffer) // width)
    zeros = memoryview(_ZEROS)
    for start in range(0, len(vector), step):
        block = vector[start : start + step]
        nothing, mask = zeros[: len(block) * width], keystream[: len(block)]
        for stream in streams:
            stream.update_into(nothing, buffer)
            combine(block, mask, out=block)

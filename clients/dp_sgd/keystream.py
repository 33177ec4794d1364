"""Keystream of AES in counter mode, from the faster implementation of this machine."""

import time
from functools import cache

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

_BLOCK_BYTES = 16
# A first request of fewer bytes is not worth a second cipher.
_MIN_GCM_BYTES = 1 << 16
# GCM counts its blocks in 32 bits; its first one here has number 2.
_MAX_GCM_BYTES = (1 << 32) * _BLOCK_BYTES - 4 * _BLOCK_BYTES
_ZEROS = memoryview(bytes(1 << 17))  # encrypted part by part, so that they stay in the cache


class Keystream:
    """AES-CTR with the counter from zero: pseudorandom bytes of a key.

    A key is used for one stream only, so the counter may start at zero. Long streams come from
    AES-GCM where that is faster: its ciphertext of zeros, with a nonce of zeros, is this stream
    from the third block on, and newer processors encrypt several blocks at once for it. Its tag is
    never computed. No byte depends on the implementation.

    Args:
        key: 16 or 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher: CipherContext | None = None
        self._written = 0
        self._gcm_limit: int | None = None

    def write(self, into: memoryview) -> None:
        """Overwrite `into` with the next bytes of the stream."""
        if self._cipher is None:
            into = self._choose_cipher(into)
        for start in range(0, len(into), len(_ZEROS)):
            self._write_part(into[start : start + len(_ZEROS)])

    def _write_part(self, part: memoryview) -> None:
        cipher = self._cipher
        if self._gcm_limit is not None and self._written + len(part) > self._gcm_limit:
            self._gcm_limit = None
            cipher = None
        if cipher is None:
            cipher = self._cipher = _ctr_cipher(self._key, self._written)
        cipher.update_into(_ZEROS[: len(part)], part)
        self._written += len(part)

    def _choose_cipher(self, into: memoryview) -> memoryview:
        """Choose the cipher by the size of the first request; return the part still to write."""
        if len(into) < _MIN_GCM_BYTES or not _gcm_is_faster():
            return into
        self._write_part(into[: 2 * _BLOCK_BYTES])
        self._cipher, self._gcm_limit = _gcm_cipher(self._key), _MAX_GCM_BYTES
        return into[2 * _BLOCK_BYTES :]


def _ctr_cipher(key: bytes, position: int) -> CipherContext:
    """Return the cipher that encrypts zeros to the stream from byte `position` on."""
    blocks, rest = divmod(position, _BLOCK_BYTES)
    counter = modes.CTR(blocks.to_bytes(_BLOCK_BYTES, "big"))
    cipher = Cipher(algorithms.AES(key), counter).encryptor()
    if rest:
        cipher.update(bytes(rest))
    return cipher


def _gcm_cipher(key: bytes) -> CipherContext:
    """Return the cipher that encrypts zeros to the stream from its third block on."""
    return Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()


@cache
def _gcm_is_faster() -> bool:
    """Whether GCM is faster on this machine, measured once in a tenth of a millisecond."""
    into = memoryview(bytearray(len(_ZEROS)))
    ciphers = [_ctr_cipher(bytes(_BLOCK_BYTES), 0), _gcm_cipher(bytes(_BLOCK_BYTES))]
    best = [float("inf"), float("inf")]
    for _ in range(3):
        for place, cipher in enumerate(ciphers):
            started = time.perf_counter()
            cipher.update_into(_ZEROS, into)
            best[place] = min(best[place], time.perf_counter() - started)
    return best[1] < best[0]

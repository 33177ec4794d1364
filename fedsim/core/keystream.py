"""Keystreams of AES in counter mode, from which noise and masks are made."""

from functools import lru_cache
from timeit import repeat

from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM

_NONCE_BYTES = 12
_FIRST_BLOCK = (2).to_bytes(4, "big")  # GCM needs blocks 0 and 1 for its tag
_SEGMENT_BYTES = 1 << 35  # GCM allows less than 2^36 bytes under one nonce
_ZEROS = memoryview(bytes(1 << 17))  # the plaintext, of a size that stays in the cache


class Keystream:
    """Stream of pseudorandom bytes from a key: zeros encrypted by AES in counter mode.

    Block i under nonce s is AES(s as 12 bytes, i + 2 as 4 bytes), the order in which GCM counts.
    The nonces are 0, 1, 2, ..., one for each 32 GiB. A key is for one stream only.

    Args:
        key: AES key of 16 or 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._written = 0

    def write(self, into: memoryview) -> None:
        """Overwrite a buffer with the next bytes of the stream."""
        while into:
            segment, position = divmod(self._written, _SEGMENT_BYTES)
            if position == 0:
                nonce = segment.to_bytes(_NONCE_BYTES, "big")
                self._cipher = _cipher(self._key, nonce, gcm=_gcm_is_faster())
            part = into[: min(len(_ZEROS), _SEGMENT_BYTES - position)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
            self._written += len(part)
            into = into[len(part) :]


def _cipher(key: bytes, nonce: bytes, *, gcm: bool) -> CipherContext | AEADEncryptionContext:
    mode = GCM(nonce) if gcm else CTR(nonce + _FIRST_BLOCK)
    return Cipher(AES(key), mode).encryptor()


@lru_cache(maxsize=1)
def _gcm_is_faster() -> bool:
    """Return whether the counter mode inside GCM takes less time here than plain counter mode.

    Both give the same bytes. Each is up to twice as fast as the other on some processors, whose
    instructions OpenSSL knows for one mode only. The measurement takes less than a millisecond.
    """
    memory = bytearray(len(_ZEROS))

    def seconds(*, gcm: bool) -> float:
        cipher = _cipher(bytes(16), bytes(_NONCE_BYTES), gcm=gcm)
        return min(repeat(lambda: cipher.update_into(_ZEROS, memory), number=1, repeat=5))

    return seconds(gcm=True) < seconds(gcm=False)

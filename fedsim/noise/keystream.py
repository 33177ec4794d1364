"""Keystream of AES in counter mode: the pseudorandom bytes of a key."""

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_NONCE_BYTES = 12
_SEGMENT_BYTES = 1 << 35  # GCM allows less than 2^36 bytes under one nonce
_ZEROS = memoryview(bytes(1 << 17))  # encrypted part by part, so that they stay in the cache


class Keystream:
    """The pseudorandom bytes of one key: zeros encrypted by AES-GCM, whose tag is never computed.

    GCM encrypts in counter mode: block i under nonce s is AES(s as 12 bytes, i + 2 as 4 bytes). Its
    implementations encrypt several blocks at once where those of plain counter mode do not yet. The
    nonces are 0, 1, 2, ..., one for each 32 GiB. A key is for one stream only.

    Args:
        key: 16 or 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._written = 0

    def write(self, into: memoryview) -> None:
        """Overwrite `into` with the next bytes of the stream."""
        while into:
            segment, position = divmod(self._written, _SEGMENT_BYTES)
            if position == 0:
                nonce = modes.GCM(segment.to_bytes(_NONCE_BYTES, "big"))
                self._cipher = Cipher(algorithms.AES(self._key), nonce).encryptor()
            part = into[: min(len(_ZEROS), _SEGMENT_BYTES - position)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
            self._written += len(part)
            into = into[len(part) :]

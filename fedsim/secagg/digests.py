"""Checksums of vectors over the ring Z_2^b, which reveal accidental damage in transit.

The decoder of a sum checks that its values are in range. This check finds a wrong mask, but often
not one flipped bit, which the checksum finds. The checksum is an AES-256-GMAC tag under a key
derived from public bytes. It is several times as fast as SHA-256. It detects accidents, not
forgeries.
"""

import hmac
from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import ShareMismatchError
from fedsim.secagg.masks import derive_key

_BLOCK_ELEMENTS = 1 << 15  # a block stays in the cache between digest and sum


def vector_tag(vector: Ring, info: bytes) -> bytes:
    """Return the checksum of a vector, a tag of 16 bytes.

    Args:
        vector: ring elements (d,).
        info: bytes that name the vector's round and parties; the checksum's key is derived from
            them.
    """
    mac = _mac(info)
    for block in _blocks(vector):
        mac.authenticate_additional_data(block.data.cast("B"))
    mac.finalize()
    return mac.tag


def verify_and_add(
    total: Ring, vector: Ring, info: bytes, tag: bytes, *, name: str, client: int | None
) -> None:
    """Add a vector to `total`, in place, if it matches its checksum.

    One pass over memory checks and adds. If the checksum is wrong, the vector is subtracted again,
    which is exact in a ring.

    Args:
        total: the sum so far, of the same type and length as `vector`.
        vector: the received ring elements (d,).
        info: the `info` bytes of the vector, as its sender computed them.
        tag: the received checksum, 16 bytes.
        name: the name of the vector in error messages.
        client: the client that error messages name; None if no client sent the vector.

    Raises:
        ShareMismatchError: the checksum does not fit vector and `info`, as one of them was changed
            in transit; `total` is unchanged.
    """
    mac = _mac(info)
    for block, total_block in zip(_blocks(vector), _blocks(total), strict=True):
        mac.authenticate_additional_data(block.data.cast("B"))
        np.add(total_block, block, out=total_block)
    mac.finalize()
    if not hmac.compare_digest(mac.tag, tag):
        np.subtract(total, vector, out=total)
        raise ShareMismatchError(
            f"{name} does not match its digest; it was damaged on the way or is of another round",
            client=client,
        )


def _mac(info: bytes) -> AEADEncryptionContext:
    key = derive_key(info, b"fedsim vector tag")
    return Cipher(AES(key), GCM(bytes(12))).encryptor()


def _blocks(vector: Ring) -> Iterator[Ring]:
    contiguous = vector if vector.flags.c_contiguous else np.ascontiguousarray(vector)
    for start in range(0, len(vector), _BLOCK_ELEMENTS):
        yield contiguous[start : start + _BLOCK_ELEMENTS]

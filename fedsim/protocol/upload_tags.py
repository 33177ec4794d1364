"""Checksums of uploads, called tags, which cover every value that leaves a client in clear.

A tag is the AES-256-GMAC (NIST SP 800-38D) of the values. The key comes from the experiment's seed,
and client and round are the nonce. Computing a tag takes a twelfth of the time of a SHA-256, which
is below 1 % of a small client's time for a round. Two different uploads have the same tag with a
probability below 2^-100, unless someone who knows the seed constructs them.
"""

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsim.core.streams import Purpose, stream_key
from fedsim.protocol.messages import TrainReply

_MOST_BYTES = 2**31 - 1  # in one call of AESGCM
_NONCE = struct.Struct("<QI")


@dataclass(frozen=True)
class UploadTags:
    """Computation of the checksums (tags) of an experiment's uploads.

    Attributes:
        seed: the experiment's seed.
    """

    seed: int

    def of(self, client: int, round_number: int, reply: TrainReply) -> str:
        """Return the tag of the values that a client released in a round, as 32 hexadecimal digits.

        The tag covers the bytes of all arrays in C order, then the adaptive clip norm and the noisy
        count, if the reply has them. It does not cover names, types and shapes, as these equal
        those of the request.

        Args:
            client: the client's number.
            round_number: the round, from 1.
            reply: the reply with the released values.
        """
        parts = [_bytes_of(array) for array in reply.arrays.values()]
        bounds = reply.clip_norm if isinstance(reply.clip_norm, tuple) else (reply.clip_norm,)
        learnt = (value for value in (*bounds, reply.clip_count) if value is not None)
        parts.extend(memoryview(struct.pack("<d", value)) for value in learnt)
        nonce = _NONCE.pack(round_number, client)
        if sum(len(part) for part in parts) <= _MOST_BYTES:
            return self._cipher.encrypt(nonce, b"", b"".join(parts)).hex()
        state = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        for part in parts:
            state.authenticate_additional_data(part)
        state.finalize()
        return state.tag.hex()

    @cached_property
    def _key(self) -> bytes:
        return stream_key(self.seed, Purpose.UPLOAD_TAG)

    @cached_property
    def _cipher(self) -> AESGCM:
        return AESGCM(self._key)


def _bytes_of(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

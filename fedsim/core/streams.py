"""Random streams keyed by (seed, purpose, client, round).

Every random number of an experiment comes from a stream of this module, never from a global
generator and never in order of arrival. So a result does not depend on scheduling, workers or
engine. A keyed hash (BLAKE2b) of the four numbers gives the key of a stream, for a cipher or for a
counter-based generator. Different numbers give independent streams.

Noise and masks are made from keystreams of AES in counter mode.

Anyone who knows the seed can reproduce these streams, as a simulation requires. So such noise does
not protect against an adversary who knows the seed.
"""

import hashlib
import struct
from enum import IntEnum
from functools import lru_cache
from timeit import repeat
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from numpy.random.bit_generator import ISeedSequence

KEY_BYTES = 32

_SCHEME = b"fedsim stream keys, version 1"  # the hash's key; another scheme is another version
_START = np.zeros(4, dtype=np.uint64)  # numpy takes long to convert its own default, 0
_FIELDS = struct.Struct("<QIII")  # seed, purpose, client, round: a fixed width, so no two collide


class Purpose(IntEnum):
    """The use of a random stream. Results depend on the members' numbers: never change them."""

    SPLIT = 1
    PARTITION = 2
    MODEL = 3
    PARTICIPATION = 4
    SAMPLING = 5
    NOISE = 6
    DROPOUT = 7
    DATASET = 8
    EPOCH = 9  # keyed by the number of the epoch in place of the round
    SHARES = 10  # clients of a group that is defined as a share of all clients
    FAULT = 11
    HELD_OUT = 12  # examples of a client that are held out of training
    EVALUATION = 13  # clients that evaluate
    CANARIES = 14  # examples that carry a canary in an audit
    PROBE = 15  # seed of the streams of a probe before round 1
    PERSONALIZATION = 16  # seed of the streams of personal models
    VIEWS = 17  # random views of examples
    SERVER_NOISE = 18  # noise that the server adds to a sum
    STEP_NOISE = 19  # fresh noise of a step of correlated noise; the step in place of the round
    ROUNDING = 20  # stochastic rounding of secure aggregation
    REQUEST_DIGEST = 21  # no stream: the key of the digests in a client's charges
    UPLOAD_TAG = 22  # no stream: the key of the tags of uploads
    SUM_DIGEST = 23  # no stream: the key of the digests of sums before the server's noise
    DIRECTIONS = 29  # public directions of zeroth-order steps
    EXAMPLE_NOISE = 41  # noise on a client's examples, drawn once
    PARTIAL_WORK = 25  # stragglers of a round (client 0), and their steps (client + 1)
    QUERIES = 50  # public queries of PATE, drawn from the test set
    STUDENT = 51  # seed of the streams of PATE's student
    FEATURES = 30  # directions of random Fourier features, by their public seed


def stream_key(seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0) -> bytes:
    """Return the 32-byte key of the random stream for (seed, purpose, client, round).

    Args:
        seed: the experiment's seed, 0 ≤ seed < 2^64.
        purpose: the purpose of the stream.
        client: the client's partition number, 0 ≤ client < 2^32 (0 for the server's streams).
        round_number: the round, 0 ≤ round_number < 2^32 (0 before round 1).

    Raises:
        ValueError: a number is outside its range, which would repeat another stream's key.
    """
    try:
        message = _FIELDS.pack(seed, purpose, client, round_number)
    except struct.error:
        numbers = (("seed", seed, 64), ("client", client, 32), ("round", round_number, 32))
        for name, value, bits in numbers:
            if not 0 <= value < 2**bits:
                raise ValueError(f"{name} must be in [0, 2^{bits}), got {value}") from None
        raise
    return hashlib.blake2b(message, key=_SCHEME, digest_size=KEY_BYTES).digest()


def stream(
    seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0
) -> np.random.Generator:
    """Return the numpy generator of the random stream for (seed, purpose, client, round).

    Args:
        seed: the experiment's seed, 0 ≤ seed < 2^64.
        purpose: the purpose of the stream.
        client: the client's partition number, 0 ≤ client < 2^32 (0 for the server's streams).
        round_number: the round, 0 ≤ round_number < 2^32 (0 before round 1).

    Raises:
        ValueError: a number is outside its range, which would repeat another stream's key.
    """
    return generator_of(stream_key(seed, purpose, client=client, round_number=round_number))


def generator_of(key: bytes) -> np.random.Generator:
    """Return the numpy generator (Philox 4x64) that is keyed by the first 128 bits of `key`."""
    words: Any = _Words(key)  # numpy accepts any ISeedSequence, but its types do not
    return np.random.Generator(np.random.Philox(words, counter=_START))


def restart_at(generator: np.random.Generator, step: int, item: int) -> None:
    """Move a stream's generator to the section of the stream that is reserved for (step, item).

    The two numbers are the upper half of the Philox counter, so sections do not overlap. Each
    section has 2^130 random words.

    Args:
        generator: a generator that `stream` returned.
        step: number of the step, 0 ≤ step < 2^64.
        item: number of the item within the step, 0 ≤ item < 2^64.
    """
    state: Any = generator.bit_generator.state
    state["state"]["counter"] = np.array([0, 0, item, step], dtype=np.uint64)
    generator.bit_generator.state = {**state, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


def torch_seed(key: bytes) -> int:
    """Return a seed for torch's generators, made from 63 bits of `key`."""
    return int.from_bytes(key[-8:], "little") >> 1


class _Words(ISeedSequence):
    """A key as numpy's seed sequence; `Philox(key=...)` would draw entropy from the system.

    Args:
        key: at least 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the first words of the key.

        Args:
            n_words: number of words.
            dtype: unsigned integer type of the words.
        """
        return np.frombuffer(self._key, np.dtype(dtype).newbyteorder("<"), count=n_words)


_NONCE_BYTES = 12
_FIRST_BLOCK = (2).to_bytes(4, "big")  # GCM needs blocks 0 and 1 for its tag
_SEGMENT_BYTES = 1 << 35  # GCM allows less than 2^36 bytes under one nonce
_ZEROS = memoryview(bytes(1 << 18))  # the plaintext, of a size that stays in the cache


class Keystream:
    """Stream of pseudorandom bytes from a key: zeros encrypted by AES in counter mode.

    Block i under nonce s is AES(s as 12 bytes, i + 2 as 4 bytes), the order in which GCM counts.
    The nonces are 0, 1, 2, ..., one for each 32 GiB. A key is for one stream only.

    Args:
        key: AES key of 16 or 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._segments = self._left = 0  # nonces used, and bytes left under the last one

    def write(self, into: memoryview) -> None:
        """Overwrite a buffer with the next bytes of the stream."""
        while into:
            if not self._left:
                nonce = self._segments.to_bytes(_NONCE_BYTES, "big")
                self._cipher = _cipher(self._key, nonce, gcm=_gcm_is_faster())
                self._segments, self._left = self._segments + 1, _SEGMENT_BYTES
            part = into[: min(len(_ZEROS), self._left)]
            size = len(part)
            self._cipher.update_into(_ZEROS[:size], part)
            self._left -= size
            into = into[size:]


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

"""Gaussian noise as integers: reproducible from a key, or from the operating system.

A draw is a normal of standard deviation 2²⁴, rounded to an integer: noise on the grid of
`fedsim.noise.release`. Draws are below 2³⁰, so float64 holds them, and their sums
with numbers below 2⁵², exactly.

Edge cases of a source's `fill_`:

| case                    | result                                                           |
|-------------------------|------------------------------------------------------------------|
| an empty tensor         | nothing is drawn                                                 |
| a view of a tensor      | filled in place, and nothing outside of it                       |
| a tensor of a GPU       | seeded: drawn there; secure: drawn on the CPU and copied         |
| a type but float64      | refused                                                          |
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedsim.core.streams import KEY_BYTES, generator_of, torch_seed
from fedsim.noise import spline
from fedsim.noise.grid import DEVIATION

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


class NoiseSource(ABC):
    """Source of a client's noise: a sequence of independent integers, rounded N(0, 2⁴⁸)."""

    @abstractmethod
    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with draws and return it.

        Raises:
            TypeError: the tensor has another type.
        """


class KeystreamNoise(NoiseSource):
    """Noise from the bytes of two keystreams, on the CPU: the law of `spline`, to the last bit."""

    @abstractmethod
    def keystreams(self) -> tuple[Keystream, Keystream]:
        """Return the stream of the draws, and that of the further bits that few of them need."""

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with draws and return it.

        Raises:
            TypeError: the tensor has another type.
        """
        _check_type(values)
        in_place = values.device.type == "cpu" and values.is_contiguous()
        drawn = values if in_place else torch.empty(values.shape, dtype=torch.float64)
        spline.fill_rows([self.keystreams()], drawn.view(1, -1).numpy())
        return values if in_place else values.copy_(drawn)


class SeededNoise(KeystreamNoise):
    """Reproducible noise of one key, drawn as `SecureNoise` draws it.

    On the CPU an AES-128 keystream gives the bytes. 128 bits separate the streams of all clients
    and rounds: among 10^9 of them, two are equal with probability 1e-21.

    On CUDA the device's own counter-based generator draws rounded normals there, without waiting
    for it; nothing is proven about their law. Its seed has 63 bits of the same key: among 10^6
    streams, two are equal with probability 1e-7. The numbers differ between the CPU and each kind
    of GPU.

    For simulation: anyone who knows the seed can subtract the noise.

    Args:
        key: 32 bytes, used for this source only (`fedsim.core.streams.stream_key`).

    Raises:
        ValueError: the key has another length.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"the key of seeded noise must have {KEY_BYTES} bytes, got {len(key)}; "
                "make it with fedsim.core.streams.stream_key"
            )
        half = KEY_BYTES // 2  # AES-128 takes three quarters of the time of AES-256
        self._streams = Keystream(key[:half]), Keystream(key[half:])
        self._device_seed = torch_seed(key)
        self._generator: torch.Generator | None = None

    def keystreams(self) -> tuple[Keystream, Keystream]:
        """Return the stream of the draws, and that of the further bits that few of them need."""
        return self._streams

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with draws and return it.

        Raises:
            TypeError: the tensor has another type.
        """
        if not values.is_cuda:
            return super().fill_(values)
        _check_type(values)
        if self._generator is None:  # torch refuses a second device by name
            self._generator = torch.Generator(values.device).manual_seed(self._device_seed)
        return values.normal_(std=DEVIATION, generator=self._generator).round_()


class SecureNoise(KeystreamNoise):
    """Unpredictable noise that cannot be repeated: AES-256, keyed by the operating system.

    There is no seed, and a forked process has keys of its own. Noise for a GPU is made on the CPU
    and copied.

    Guarantee: the law of a draw is that of `spline`, to the last bit, on every processor.
    """

    def __init__(self) -> None:
        self._process = -1

    def keystreams(self) -> tuple[Keystream, Keystream]:
        """Return the stream of the draws, and that of the further bits that few of them need."""
        if self._process != os.getpid():  # a fork's parent and child would draw the same noise
            keys = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
            self._streams = Keystream(keys[0]), Keystream(keys[1])
            self._process = os.getpid()
        return self._streams

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("secure noise cannot be copied or stored: the copy would repeat it")


class NoNoise(NoiseSource):
    """Zeros, for a release whose noise another party adds: its values are rounded to the grid."""

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with zeros and return it.

        Raises:
            TypeError: the tensor has another type.
        """
        _check_type(values)
        return values.zero_()


def secret_stream() -> np.random.Generator:
    """Return an unpredictable stream, keyed by 128 bits from the operating system.

    It is for lots, which no adversary sees. Released noise comes from `SecureNoise`.
    """
    return generator_of(os.urandom(KEY_BYTES))


def fill_rows_(sources: Sequence[NoiseSource], rows: Tensor) -> None:
    """Fill each row of float64 (K, m) as its source's `fill_` would.

    Many short rows are computed at once, which saves calls for each row.

    Args:
        sources: one for each row.
        rows: filled in place.
    """
    streams = keystreams_of(sources)
    if streams is not None and rows.device.type == "cpu" and rows.stride(1) == 1:
        spline.fill_rows(streams, rows.numpy())
        return
    for source, row in zip(sources, rows, strict=True):
        source.fill_(row)


def keystreams_of(
    sources: Sequence[NoiseSource | None],
) -> list[tuple[Keystream, Keystream]] | None:
    """Return the streams of each source if all draw from keystreams, else None."""
    found = [one.keystreams() for one in sources if isinstance(one, KeystreamNoise)]
    return found if len(found) == len(sources) else None


def _check_type(values: Tensor) -> None:
    if values.dtype != torch.float64:
        raise TypeError(f"noise is drawn as integers in float64, got a tensor of {values.dtype}")

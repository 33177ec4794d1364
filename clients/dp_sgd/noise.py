"""Gaussian noise of a step: reproducible from a keyed stream, or from the operating system.

Normals are made at unit scale and multiplied by the standard deviation last. A deviation at which
the tensor's type would not keep the normal distribution is refused (`check_deviations`).

Edge cases of a source's `fill_`:

| case                    | result                                                           |
|-------------------------|------------------------------------------------------------------|
| standard deviation 0    | zeros; the stream still advances                                 |
| the smallest uniform    | a finite value, 6.8 (float32) or 8.6 (float64) deviations from 0 |
| deviations out of range | refused; in float32 below 1.2e-32 or above 3.2e32                |
| an empty tensor         | nothing is drawn                                                 |
| a view of a tensor      | filled in place, and nothing outside of it                       |
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.keystream import Keystream
from fedsim.core.streams import KEY_BYTES, generator_of, torch_seed


class NoiseRangeError(ValueError):
    """A standard deviation at which a floating-point type does not keep the distribution."""


def check_deviations(
    deviations: Iterable[float], dtype: torch.dtype, what: str = "the standard deviation of noise"
) -> None:
    """Check that a type holds noise of these deviations, and what is added to it.

    Guarantee: a value down to 2⁻²⁰ deviations is a normal number with all its digits, and the sum
    of 2²⁰ values of one deviation does not overflow. 0 stands for no noise.

    Args:
        deviations: standard deviations, or other sizes of what is written.
        dtype: of the tensor that holds them.
        what: starts the message.

    Raises:
        NoiseRangeError: a deviation is outside the range; the message names both.
    """
    info = torch.finfo(dtype)
    low, high = info.tiny * _HEADROOM, info.max / _HEADROOM
    for deviation in deviations:
        if not (low <= deviation <= high or deviation == 0.0):
            raise NoiseRangeError(
                f"{what} is {deviation:.3g}; {str(dtype).removeprefix('torch.')} keeps the "
                f"normal distribution from {low:.2g} to {high:.2g} only"
            )


class NoiseSource(ABC):
    """Source of a client's noise: a sequence of independent standard normals."""

    @abstractmethod
    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it.

        Raises:
            NoiseRangeError: the tensor's type cannot hold such noise.
        """


class SeededNoise(NoiseSource):
    """Reproducible noise of one key.

    On the CPU an AES-128 keystream gives the uniforms. 128 bits separate the streams of all clients
    and rounds: among 10^9 of them, two are equal with probability 1e-21. In float32, normals come
    from 32-bit uniforms by Box-Muller; they end at 6.8 standard deviations, a probability of 1e-11
    a value. In float64 they come from 53-bit uniforms as in `SecureNoise`.

    On CUDA the device's own counter-based generator fills the tensor there, without waiting for it.
    Its seed has 63 bits of the same key: among 10^6 streams, two are equal with probability 1e-7.
    The law is the same; the numbers differ between the CPU and each kind of GPU.

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
        self.keystream = Keystream(key[:_SEEDED_KEY_BYTES])
        self._device_seed = torch_seed(key)
        self._generator: torch.Generator | None = None

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
        check_deviations([standard_deviation], values.dtype)
        if values.is_cuda:
            return self._fill_on_device_(values).mul_(standard_deviation)
        if values.dtype != torch.float32:
            return values.copy_(_float64_normals(self.keystream, values.shape, standard_deviation))
        in_place = values.device.type == "cpu" and values.is_contiguous()
        drawn = values if in_place else torch.empty(values.shape)
        column = np.array([[standard_deviation]], dtype=np.float32)
        _fill_float32([self.keystream], drawn.view(1, -1).numpy(), column)
        return values if in_place else values.copy_(drawn)

    def _fill_on_device_(self, values: Tensor) -> Tensor:
        """Fill a CUDA tensor with standard normals. torch refuses a second device by name."""
        if self._generator is None:
            self._generator = torch.Generator(values.device).manual_seed(self._device_seed)
        return values.normal_(generator=self._generator)


class SecureNoise(NoiseSource):
    """Unpredictable noise that cannot be repeated: AES-256, keyed by the operating system.

    Normals come from 53-bit uniforms by Box-Muller in float64; they end at 8.6 standard deviations,
    a probability of 1e-17 a value. They are scaled before they are rounded to the tensor's type.
    There is no seed, and a forked process has a key of its own. Noise for a GPU is made on the CPU
    and copied.

    It is not a discrete mechanism: the sum is floating point, so attacks on its rounding (Mironov
    2012; Jin et al. 2022) remain.
    """

    def __init__(self) -> None:
        self._process = -1

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
        check_deviations([standard_deviation], values.dtype)
        if self._process != os.getpid():
            self._start()
        return values.copy_(_float64_normals(self._keystream, values.shape, standard_deviation))

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("secure noise cannot be copied or stored: the copy would repeat it")

    def _start(self) -> None:
        """Start a keystream; after a fork the parent's key would give both the same noise."""
        self._keystream = Keystream(os.urandom(_SECURE_KEY_BYTES))
        self._process = os.getpid()


def secret_stream() -> np.random.Generator:
    """Return an unpredictable stream, keyed by 128 bits from the operating system.

    It is for lots, which no adversary sees. Released noise comes from `SecureNoise`.
    """
    return generator_of(os.urandom(KEY_BYTES))


def fill_rows_(sources: Sequence[NoiseSource], rows: Tensor, deviations: Sequence[float]) -> None:
    """Fill each row of `rows` (clients, size) as its source's `fill_` would, to the bit.

    Seeded float32 noise of many short rows is computed at once, which saves calls for each row.

    Args:
        sources: one for each row.
        rows: (clients, size), filled in place.
        deviations: the standard deviation of each row.

    Raises:
        NoiseRangeError: the type cannot hold such noise.
    """
    keystreams = [source.keystream for source in sources if isinstance(source, SeededNoise)]
    in_place = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.stride(1) == 1
    if in_place and len(keystreams) == len(sources):
        check_deviations(deviations, rows.dtype)
        _fill_float32(keystreams, rows.numpy(), np.array(deviations, dtype=np.float32)[:, None])
        return
    for source, row, deviation in zip(sources, rows, deviations, strict=True):
        source.fill_(row, deviation)


def _float64_normals(keystream: Keystream, shape: torch.Size, standard_deviation: float) -> Tensor:
    """Return normals of the given shape in float64, by Box-Muller from 53-bit uniforms."""
    normals = np.empty(shape.numel())
    for start in range(0, len(normals), _CHUNK_VALUES):  # bounds the memory of the uniforms
        part = normals[start : start + _CHUNK_VALUES]
        pairs = -(-len(part) // 2)
        words = np.empty(2 * pairs, dtype="<u8")
        keystream.write(words.view(np.uint8).data)
        uniforms = (words >> np.uint64(11)) * 2.0**-53  # in [0, 1), 53 bits, exact
        radius = np.sqrt(-2.0 * np.log(uniforms[:pairs] + 2.0**-53))  # of (0, 1]: never log 0
        angle = 2.0 * np.pi * uniforms[pairs:]
        part[:] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: len(part)]
    normals *= standard_deviation
    return torch.from_numpy(normals).view(shape)


def _fill_float32(
    keystreams: Sequence[Keystream], rows: np.ndarray, deviations: np.ndarray
) -> None:
    """Fill rows with normals in float32, in blocks that stay in the processor's cache.

    Args:
        keystreams: one for each row.
        rows: float32 (clients, size), overwritten.
        deviations: the standard deviation of each row, float32 (clients, 1).
    """
    for column in range(0, rows.shape[1], _CACHE_VALUES):
        part = rows[:, column : column + _CACHE_VALUES]
        num_rows = _CACHE_VALUES // part.shape[1]
        for row in range(0, len(part), num_rows):
            block, own = part[row : row + num_rows], slice(row, row + num_rows)
            words = _words_of(block)
            for keystream, line in zip(keystreams[own], words.view(np.uint8), strict=True):
                keystream.write(line.data)
            _box_muller_float32(words, block)
            block *= deviations[own]


def _words_of(values: np.ndarray) -> np.ndarray:
    """Return memory for the uniforms of normals (..., n): two for each pair of normals.

    It is the memory of the normals where that is large enough, which spares the cache.
    """
    odd = values.shape[-1] % 2
    if not odd:
        return values.view("<u4")
    return np.empty((*values.shape[:-1], values.shape[-1] + 1), dtype="<u4")


def _box_muller_float32(words: np.ndarray, into: np.ndarray) -> None:
    """Convert random words to standard normals by Box-Muller.

    Args:
        words: unsigned integers (..., 2 · pairs).
        into: overwritten by the normals (..., n); may be the memory of `words`.
    """
    pairs = words.shape[-1] // 2
    radius = words[..., :pairs].astype(np.float32)
    angle = words[..., pairs:].view("<i4").astype(np.float32)  # faster than from unsigned words
    radius += np.float32(0.5)  # of (0, 2^32]: never log 0
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)  # not log2: without AVX-512 numpy takes thrice the time for it
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle *= np.float32(2.0 * np.pi * 2.0**-32)
    first, second = into[..., :pairs], into[..., pairs:]
    rest = second.shape[-1]
    np.cos(angle, out=first)
    first *= radius
    np.sin(angle[..., :rest], out=second)
    second *= radius[..., :rest]


_HEADROOM = 2.0**20
_SEEDED_KEY_BYTES = 16  # AES-128 takes three quarters of the time of AES-256
_SECURE_KEY_BYTES = 32
_CHUNK_VALUES = 1 << 20
_CACHE_VALUES = 1 << 17  # values whose uniforms and normals fit into the cache of a core

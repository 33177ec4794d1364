"""Gaussian noise of a step: reproducible from a keyed stream, or from the operating system.

Edge cases of a source's `fill_`:

| case                    | result                                                           |
|-------------------------|------------------------------------------------------------------|
| standard deviation 0    | zeros; the stream still advances                                 |
| the smallest uniform    | a finite value, 6.8 (float32) or 8.6 (float64) deviations from 0 |
| an empty tensor         | nothing is drawn                                                 |
| a view of a tensor      | filled in place, and nothing outside of it                       |
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.keystream import Keystream


class NoiseSource(ABC):
    """Source of a client's noise: a sequence of independent standard normals."""

    @abstractmethod
    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""


class SeededNoise(NoiseSource):
    """Reproducible noise: an AES-128-CTR keystream whose key comes from a keyed stream.

    A key of 128 bits separates the streams of all clients and rounds: among 10^9 of them, two are
    equal with probability 1e-21. In float32, normals come from 32-bit uniforms by Box-Muller; they
    end at 6.8 standard deviations, a probability of 1e-11 a value. In float64 they come from 53-bit
    uniforms as in `SecureNoise`. A keystream in hardware with vectorised arithmetic takes half the
    time of torch's own normals.

    For simulation: anyone who knows the seed can subtract the noise.

    Args:
        stream: the keyed stream; its next 16 bytes become the key.
    """

    def __init__(self, stream: np.random.Generator) -> None:
        self.keystream = Keystream(_key_of(stream))

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
        on_cpu = values.device.type == "cpu" and values.is_contiguous()
        if values.dtype != torch.float32:
            return values.copy_(_float64_normals(self.keystream, values.shape, standard_deviation))
        # The same noise on every device.
        drawn = values if on_cpu else torch.empty(values.shape)
        _fill_float32(self.keystream, drawn.view(-1).numpy(), standard_deviation)
        return values if on_cpu else values.copy_(drawn)


class SecureNoise(NoiseSource):
    """Unpredictable noise that cannot be repeated: AES-256-CTR, keyed by the operating system.

    Normals come from 53-bit uniforms by Box-Muller in float64; they end at 8.6 standard deviations,
    a probability of 1e-17 a value. They are scaled before they are rounded to the tensor's type.
    There is no seed, and a forked process has a key of its own.

    It is not a discrete mechanism: the sum is floating point, so attacks on its rounding (Mironov
    2012; Jin et al. 2022) remain.
    """

    def __init__(self) -> None:
        self._process = -1

    def fill_(self, values: Tensor, standard_deviation: float) -> Tensor:
        """Fill `values` in place with independent N(0, standard_deviation²) and return it."""
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
    """Return an unpredictable stream, seeded with 256 bits from the operating system.

    It is for lots, which no adversary sees. Released noise comes from `SecureNoise`.
    """
    entropy = int.from_bytes(os.urandom(32), "big")
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy)))


def fill_rows_(sources: Sequence[NoiseSource], rows: Tensor, deviations: Sequence[float]) -> None:
    """Fill each row of `rows` (clients, size) as its source's `fill_` would, to the bit.

    Seeded float32 noise of many short rows is computed at once, which saves a call for each row.

    Args:
        sources: one for each row.
        rows: (clients, size), filled in place.
        deviations: the standard deviation of each row.
    """
    keystreams = [source.keystream for source in sources if isinstance(source, SeededNoise)]
    size = rows.shape[1]
    together = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.stride(1) == 1
    if not together or len(keystreams) < len(sources) or not 0 < size <= _CACHE_VALUES:
        for source, row, deviation in zip(sources, rows, deviations, strict=True):
            source.fill_(row, deviation)
        return
    values, column = rows.numpy(), np.array(deviations)[:, None]
    each = _CACHE_VALUES // size
    for start in range(0, len(values), each):
        part = slice(start, start + each)
        _fill_rows_float32(keystreams[part], values[part], column[part])


def _key_of(stream: np.random.Generator) -> bytes:
    """Return the next bytes of a stream; a PCG64DXSM gives them in a seventh of the time."""
    if isinstance(stream.bit_generator, np.random.PCG64DXSM):
        words: np.ndarray = stream.bit_generator.random_raw(_SEEDED_KEY_BYTES // 8)
        return words.astype("<u8").tobytes()
    return stream.bytes(_SEEDED_KEY_BYTES)


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


def _fill_float32(keystream: Keystream, values: np.ndarray, standard_deviation: float) -> None:
    """Fill `values` (n,) with normals in float32, in parts that stay in the processor's cache."""
    for start in range(0, len(values), _CACHE_VALUES):
        part = values[start : start + _CACHE_VALUES]
        words = _words_of(part)
        keystream.write(words.view(np.uint8).data)
        _box_muller_float32(words, part, standard_deviation)


def _fill_rows_float32(
    keystreams: Sequence[Keystream], rows: np.ndarray, column: np.ndarray
) -> None:
    """Fill rows (keystreams, n) with normals in float32 of the deviations (keystreams, 1) given."""
    words = _words_of(rows)
    for keystream, row in zip(keystreams, words.view(np.uint8), strict=True):
        keystream.write(row.data)
    _box_muller_float32(words, rows, column)


def _words_of(values: np.ndarray) -> np.ndarray:
    """Return memory for the uniforms of normals (..., n): two for each pair of normals.

    It is the memory of the normals where that is large enough, which spares the cache.
    """
    odd = values.shape[-1] % 2
    if not odd:
        return values.view("<u4")
    return np.empty((*values.shape[:-1], values.shape[-1] + 1), dtype="<u4")


def _box_muller_float32(words: np.ndarray, into: np.ndarray, deviation: float | np.ndarray) -> None:
    """Convert random words to normals by Box-Muller.

    Args:
        words: unsigned integers (..., 2 · pairs).
        into: overwritten by the normals (..., n); may be the memory of `words`.
        deviation: the standard deviation, or one for each row (rows, 1).
    """
    pairs, (log, unit) = words.shape[-1] // 2, fast_logarithm()
    radius = words[..., :pairs].astype(np.float32)
    angle = words[..., pairs:].view("<i4").astype(np.float32)  # faster than from unsigned words
    radius += np.float32(0.5)  # of (0, 2^32]: never log 0
    radius *= np.float32(2.0**-32)
    log(radius, out=radius)
    radius *= np.asarray(-2.0 * unit * deviation**2, dtype=np.float32)
    np.sqrt(radius, out=radius)
    angle *= np.float32(2.0 * np.pi * 2.0**-32)
    first, second = into[..., :pairs], into[..., pairs:]
    rest = second.shape[-1]
    np.cos(angle, out=first)
    first *= radius
    np.sin(angle[..., :rest], out=second)
    second *= radius[..., :rest]


@cache
def fast_logarithm() -> tuple[np.ufunc, float]:
    """Return the faster logarithm of this machine, and the natural one of its base.

    Where numpy has a vectorised log2 (AVX-512), it takes two thirds of the time of log; elsewhere
    it takes twice as long. The last bit of a normal may depend on the kind of processor, as those
    of matrix products do.
    """
    try:
        from numpy.lib.introspect import opt_func_info
    except ImportError:  # numpy < 2
        return np.log2, math.log(2.0)
    kinds = opt_func_info(func_name="^log2$", signature="float32").get("log2", {}).values()
    if any(not kind["current"].startswith("baseline") for kind in kinds):
        return np.log2, math.log(2.0)
    return np.log, 1.0


_SEEDED_KEY_BYTES = 16  # AES-128 takes three quarters of the time of AES-256
_SECURE_KEY_BYTES = 32
_CHUNK_VALUES = 1 << 20
_CACHE_VALUES = 1 << 17  # values whose uniforms and normals fit into the cache of a core

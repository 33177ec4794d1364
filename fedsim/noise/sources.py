"""Sources of integer Gaussian noise, from a key (reproducible) or from the operating system.

A draw is a normal of standard deviation 2²⁴, rounded to an integer; `fedsim.noise.release` adds it
to integer sums. Draws are below 2³⁰. So float64 holds them exactly, and also their sums with
numbers below 2⁵².

Edge cases of a source's `fill_`:

| case                    | result                                                           |
|-------------------------|------------------------------------------------------------------|
| an empty tensor         | nothing is drawn                                                 |
| a view of a tensor      | filled in place, and nothing outside of it                       |
| a tensor on a GPU       | seeded: drawn on the GPU; secure: drawn on the CPU and copied    |
| a type but float64      | refused                                                          |
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.core.keystream import Keystream
from fedsim.core.streams import KEY_BYTES, generator_of, torch_seed
from fedsim.noise import spline
from fedsim.noise.grid import DEVIATION


class NoiseSource(ABC):
    """Source of a client's noise: independent integers distributed as rounded N(0, 2⁴⁸)."""

    def keystreams(self) -> tuple[Keystream, Keystream] | None:
        """Return the keystreams that the noise is computed from; None for another kind of noise."""
        return None

    @abstractmethod
    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with independent draws and return it.

        Raises:
            TypeError: the tensor is not float64.
        """


class KeystreamNoise(NoiseSource):
    """Base class of sources that compute noise on the CPU from two keystreams (see `spline`)."""

    @abstractmethod
    def keystreams(self) -> tuple[Keystream, Keystream]:
        """Return two keystreams: random words for the draws, and extra bits for undecided draws.

        A word of 4 bytes leaves one draw in 2¹⁹ undecided.
        """

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with independent draws and return it.

        Raises:
            TypeError: the tensor is not float64.
        """
        _check_type(values)
        in_place = values.device.type == "cpu" and values.is_contiguous()
        drawn = values if in_place else torch.empty(values.shape, dtype=torch.float64)
        spline.fill_rows([self.keystreams()], drawn.view(1, -1).numpy())
        return values if in_place else values.copy_(drawn)


class SeededNoise(KeystreamNoise):
    """Source of reproducible noise from a key, for simulations.

    Anyone who knows the seed can subtract the noise.

    On the CPU an AES-128 keystream gives the bytes. 128 bits separate the streams of all clients
    and rounds: among 10^9 streams, two are equal with probability 1e-21.

    On CUDA the device's counter-based generator draws rounded normals on the GPU, without a
    synchronization. Nothing is proven about their distribution. The generator's seed has 63 bits of
    the same key: among 10^6 streams, two are equal with probability 1e-7. The numbers differ
    between the CPU and each kind of GPU.

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
        """Return two keystreams: random words for the draws, and extra bits for undecided draws."""
        return self._streams

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with independent draws and return it.

        Raises:
            TypeError: the tensor is not float64.
        """
        if not values.is_cuda:
            return super().fill_(values)
        _check_type(values)
        if self._generator is None:  # torch refuses a second device by name
            self._generator = torch.Generator(values.device).manual_seed(self._device_seed)
        return values.normal_(std=DEVIATION, generator=self._generator).round_()


class SecureNoise(KeystreamNoise):
    """Source of unpredictable noise, made by AES-256 with keys from the operating system.

    The noise cannot be repeated, and a forked process draws new keys. Noise for a GPU is computed
    on the CPU and copied.

    Guarantee: a draw has exactly the distribution of the sampler in `spline`, on every processor.
    """

    def __init__(self) -> None:
        self._process = -1

    def keystreams(self) -> tuple[Keystream, Keystream]:
        """Return two keystreams: random words for the draws, and extra bits for undecided draws."""
        if self._process != os.getpid():  # a fork's parent and child would draw the same noise
            keys = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
            self._streams = Keystream(keys[0]), Keystream(keys[1])
            self._process = os.getpid()
        return self._streams

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("secure noise cannot be copied or stored: the copy would repeat it")


class NoNoise(NoiseSource):
    """Source of zeros, for a release to which another party adds the noise."""

    def fill_(self, values: Tensor) -> Tensor:
        """Fill a float64 tensor in place with zeros and return it.

        Raises:
            TypeError: the tensor is not float64.
        """
        _check_type(values)
        return values.zero_()


def secret_stream() -> np.random.Generator:
    """Return an unpredictable numpy generator, seeded by 128 bits from the operating system.

    The generator draws batches, which no adversary sees. Released noise comes from `SecureNoise`
    instead.
    """
    return generator_of(os.urandom(KEY_BYTES))


def fill_rows_(sources: Sequence[NoiseSource], rows: Tensor) -> None:
    """Fill each row of a tensor in place with draws of the row's noise source.

    The draws are those that the source's `fill_` would make. Short rows are computed together,
    which is faster.

    Args:
        sources: noise source of each row.
        rows: tensor (K, m), float64, to fill.
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
    """Return the pair of keystreams of each source; None if a source is no `KeystreamNoise`."""
    streams = []
    for source in sources:
        pair = None if source is None else source.keystreams()
        if pair is None:
            return None
        streams.append(pair)
    return streams


def _check_type(values: Tensor) -> None:
    if values.dtype != torch.float64:
        raise TypeError(f"noise is drawn as integers in float64, got a tensor of {values.dtype}")

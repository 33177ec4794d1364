"""Integer Gaussian noise, from a key (reproducible) or the operating system, and its grid.

Sums are rounded to the grid before noise is added. One step of the grid is 2⁻²⁴ standard deviations
of the noise. Accounting uses a noise multiplier that is reduced for the rounding. Theorem and
proof: docs/explain/proofs.md.

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

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsim.core.streams import KEY_BYTES, Keystream, generator_of, torch_seed
from fedsim.noise import spline

GRID_BITS = 24
DEVIATION = 2.0**GRID_BITS
"""Standard deviation of the noise, in steps of the grid."""

MAX_DRAW = 1 << 30
"""Bound on the size of every draw of a noise source: 64 standard deviations."""

SATURATION = 2.0**51
"""Largest sum, in steps of the grid: with noise below 2³⁰, float64 holds it exactly."""

_ROUNDED_DOWN = 1.0 - 2.0**-48  # a factor that outweighs the rounding of a formula's operations


@dataclass(frozen=True)
class SumRounding:
    """Bound on the rounding error of a sum of clipped gradients, in float32 or float64.

    Guarantee: a computed sum of the contributions of at most n examples, each of norm at most C, is
    within `error` · C of the exact sum, in any order of addition. Batches of at most `rows`
    examples are added in float32 and all larger ones in float64.

    - float32: with R = `rows`, contributions are added in runs of at most h = `height` examples,
      and then the at most R / h runs are added. The error is R γ(h + R / h + 2), with γ(m) = m u /
      (1 − m u) and u = 2⁻²⁴ (Higham 2002, section 3.1). Underflow costs less than 2⁻¹⁰⁰ grid steps
      (a step is 2⁻²⁴ standard deviations of the noise).
    - float64: a contribution passes through at most n additions within padded batches, and one more
      for each padded batch. The error is n (2 n + 16) 2⁻⁵³ (Higham 2002, section 4.2).

    Attributes:
        rows: largest number R of examples in a batch that is added in float32. The value 0 means
            that float32 is not used.
        height: largest number h of contributions that are added in one run in float32, one of
            `SUM_HEIGHTS`.
        error: largest error e of a sum, in units of the clip norm C.
    """

    rows: int
    height: int
    error: float

    @classmethod
    def of(cls, examples: int, rows: int) -> Self:
        """Return the bound on the rounding error of sums over a client's batches.

        The rounding of float32 sums lowers the effective noise multiplier by the fraction 2 ·
        error. If this fraction is above 2⁻⁸ with each height, the sums are in float64 instead.

        Args:
            examples: public limit n on the number of examples in a batch.
            rows: public number R of a client's examples in a padded batch.
        """
        rows, double = min(examples, rows), examples * (2.0 * examples + 16.0) * 2.0**-53
        for height in SUM_HEIGHTS:
            operations = min(rows, height) + math.ceil(rows / height) + 2
            single = rows * operations * 2.0**-24 / (1.0 - operations * 2.0**-24)
            if single <= _MOST_ERROR:
                return cls(rows, height, max(single, double) / _ROUNDED_DOWN)
        return cls(0, SUM_HEIGHTS[-1], double)


SUM_HEIGHTS = (64, 48)
"""Numbers of contributions of examples that are added in one run in float32.

The second is for batches for which the first would round too much.
"""

_MOST_ERROR = 2.0**-9


def effective_multiplier(
    noise_multiplier: float,
    dimensions: int,
    error: float,
    *,
    column_norm: float = 1.0,
    bands: int = 1,
) -> float:
    """Return the effective noise multiplier z' ≤ z, which covers rounding to the integer grid.

    Guarantee: an example moves the integers f = rint(S) of a sum S by at most 2²⁴ / z' in L2 norm.
    So f plus rounded normals of standard deviation 2²⁴ is a function of a Gaussian release with
    noise multiplier z' = z / (1 + 2 e + z √d 2⁻²⁴), rounded down.

    With correlated noise, an example of one step also moves the releases of the b − 1 following
    steps; together they move by at most 2²⁴ / z' in L2 norm. Each of the later steps rounds once
    more, so z' = z / (‖c‖ (1 + 2 e + z √d 2⁻²⁴) + z √((b − 1) d) 2⁻²⁴)
    (docs/howto/correlated_noise.md).

    Args:
        noise_multiplier: nominal noise multiplier z ≥ 0 of a group of values.
        dimensions: number of values d in the group.
        error: rounding error e of the group's sum, in clip norms (see `SumRounding`).
        column_norm: column norm ‖c‖ of correlated noise (`NoiseCorrelation`); 1 for independent
            noise.
        bands: number of bands b of correlated noise; 1 for independent noise.
    """
    if noise_multiplier == 0.0:
        return 0.0
    steps = noise_multiplier * math.sqrt(dimensions) / DEVIATION
    moved = column_norm * (1.0 + 2.0 * error + steps) + math.sqrt(bands - 1) * steps
    return noise_multiplier / moved * _ROUNDED_DOWN


def nominal_multiplier(wanted: float, nominal: float, effective: Callable[[float], float]) -> float:
    """Return a nominal noise multiplier whose effective noise multiplier is at least `wanted`.

    Args:
        wanted: smallest effective noise multiplier to reach.
        nominal: noise multiplier to start from, which is returned if it suffices.
        effective: function from a nominal to its effective noise multiplier.

    Raises:
        ValueError: no nominal multiplier suffices: rounding the model's values costs too much.
    """
    for _ in range(_MOST_TRIALS):
        reached = effective(nominal)
        if reached >= wanted:
            return nominal
        nominal *= max(wanted / reached, 1.0 + 2.0**-50)
    raise ValueError(
        f"noise_multiplier {wanted:.6g} is out of reach for this model: rounding its values to the "
        "grid costs more; use a smaller model, or a larger target_epsilon"
    )


_MOST_TRIALS = 100


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

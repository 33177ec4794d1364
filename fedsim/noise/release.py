"""Release of clipped sums: they are rounded to integers, get integer noise, and are scaled.

After the noise is added, every operation is a function of the released integers. So the scale, the
floating-point type and the rounding of the result reveal nothing more about the data. With numba
(pip extra `fast`) a long run releases by a compiled loop, with the same bits: all operations are on
integers and float64. The loop takes half the time, as intermediate results stay in registers.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby, pairwise
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.noise.sources import SATURATION, NoiseSource, fill_rows_, keystreams_of
from fedsim.noise.spline import (
    BYTES,
    CHUNK_VALUES,
    UNIFORM_BITS,
    WORD_BITS,
    ZERO_COLUMN,
    ByteStream,
    centre_table,
    chunks,
    extended_below,
    random_words,
)

LEAST_VALUES = 1 << 24
"""Number of released values above which the start-up of numba, about a second, pays off."""

Kernel = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Scales:
    """Lengths of a grid step, by which whole grid steps are multiplied.

    Attributes:
        lengths: length in each row and in each part of the values, float64 (K, parts).
        stops: end of each part of the values, in order; the last is the number of values.
    """

    lengths: Tensor
    stops: Sequence[int]

    def of_rows(self, rows: slice) -> "Scales":
        """Return the lengths of some rows."""
        return Scales(self.lengths[rows], self.stops)


def release_(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales | None, into: Tensor
) -> None:
    """Write noisy sums, (rint(sums) + noise) · scale, into a tensor.

    Guarantee: a row with noise is a function of integers: its rounded sums, limited to ±2⁵¹, plus
    the draws of its noise source. A row without a noise source is sums · scale and has no privacy.

    Args:
        sums: sums (K, size), float32 or float64, in grid steps (2⁻²⁴ standard deviations of the
            noise); overwritten.
        noises: noise source of each row; None for a row without noise.
        scales: lengths of a grid step; None means 1, so the result is in grid steps.
        into: the result (K, size), of any floating-point type; it may be `sums`.
    """
    if scales is None:
        scales = Scales(sums.new_ones(len(sums), 1, dtype=torch.float64), (sums.shape[1],))
    compiled, most = _kernel_for(sums, into), max(1, _BLOCK_VALUES // max(1, sums.shape[1]))
    for has_noise, run in equal_runs([noise is not None for noise in noises]):
        streams = keystreams_of(noises[run]) if has_noise and compiled is not None else None
        if compiled is not None and streams is not None:
            release_rows(compiled, streams, sums[run], scales.of_rows(run), into[run])
            continue
        for start in range(run.start, run.stop, most):
            rows = slice(start, min(start + most, run.stop))
            _release_block(noises[rows], sums[rows], scales.of_rows(rows), into[rows])


def _kernel_for(sums: Tensor, into: Tensor) -> Kernel | None:
    """Return the compiled loop; None where it cannot be used or would not save time."""
    if into is sums or sums.device.type != "cpu" or into.dtype not in _COMPILED_TYPES:
        return None
    lie_in_rows = sums.is_contiguous() and into.is_contiguous()
    return _DEMAND.kernel(sums.numel()) if lie_in_rows else None


_COMPILED_TYPES = (torch.float32, torch.float64)


def _release_block(
    noises: Sequence[NoiseSource | None], sums: Tensor, scales: Scales, into: Tensor
) -> None:
    """Release rows of which either all or none have a noise source."""
    sources = [noise for noise in noises if noise is not None]
    for start in range(0, sums.shape[1], _BLOCK_VALUES):
        stop = min(start + _BLOCK_VALUES, sums.shape[1])
        block = sums[:, start:stop]
        if sources:
            block = _noisy(block, sources)
        for part, (begin, end) in enumerate(pairwise((0, *scales.stops))):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                values, length = block[:, first - start : last - start], scales.lengths[:, [part]]
                torch.mul(values, length, out=into[:, first:last])  # in float64, as lengths are


def _noisy(block: Tensor, sources: Sequence[NoiseSource]) -> Tensor:
    """Return the rounded sums plus the noise of each row, as whole numbers in float64."""
    drawn = block.new_empty(block.shape, dtype=torch.float64)
    fill_rows_(sources, drawn)
    return drawn.add_(block.round_().clamp_(-SATURATION, SATURATION))


def equal_runs(values: Iterable[T]) -> Iterator[tuple[T, slice]]:
    """Yield the runs of equal successive values, as pairs of the value and the run's slice."""
    start = 0
    for value, run in groupby(values):
        stop = start + len(tuple(run))
        yield value, slice(start, stop)
        start = stop


_BLOCK_VALUES = 1 << 17  # a multiple of CHUNK_VALUES


class Demand:
    """Counter of the values that a process has released, which decides when to start numba.

    The decision changes only the speed, never a result.

    Attributes:
        values: number of values released so far.
    """

    def __init__(self) -> None:
        self.values = 0

    def kernel(self, values: int) -> Kernel | None:
        """Add `values` to the number of released values; return the compiled noise loop or None.

        The result is None without numba, or while that number is below `LEAST_VALUES`.

        Args:
            values: number of values of the next release.
        """
        self.values += values
        return kernel() if self.values >= LEAST_VALUES else None


_DEMAND = Demand()


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """Return the compiled loop that adds noise to sums and scales the result.

    The result is None without numba or on a big-endian processor.
    """
    if sys.byteorder != "little" or find_spec("numba") is None:
        return None
    from numba import njit

    try:
        return njit(cache=True, error_model="numpy")(_release)
    except RuntimeError:  # no cache folder can be written, so each process compiles anew
        return njit(error_model="numpy")(_release)


def release_rows(
    compiled: Kernel,
    streams: Sequence[tuple[ByteStream, ByteStream]],
    sums: Tensor,
    scales: Scales,
    into: Tensor,
) -> None:
    """Write noisy sums, (clip(rint(sums)) + noise) · scale, into a tensor.

    Guarantee: the noise is that of `spline.fill_rows`, and the result has the same bits as without
    numba.

    Args:
        compiled: the compiled loop of `kernel`.
        streams: two keystreams of each row: random words for the draws, and extra bits for draws
            that a word leaves undecided.
        sums: sums (K, n) in grid steps (2⁻²⁴ standard deviations of the noise), contiguous.
        scales: lengths of a grid step.
        into: the result (K, n), contiguous; it must not share memory with `sums`.
    """
    size = min(sums.numel(), _BLOCK_VALUES)
    words, chosen = np.empty(BYTES * size, np.uint8), np.empty(_PICKS, np.int32)
    undecided = np.empty(size, np.int64)
    stops, lengths = np.array(scales.stops), scales.lengths.numpy()
    before, after = sums.numpy(), into.numpy()
    fixed = _packed(), chosen, before, stops, lengths, after, undecided
    for rows, columns in chunks(*sums.shape, most=_BLOCK_VALUES):
        pairs, n = streams[rows], columns.stop - columns.start
        drawn = random_words([stream for stream, _ in pairs], n, words)
        count = compiled(drawn, rows.start, columns.start, *fixed)
        for place in undecided[:count]:  # once in 2¹⁹ values
            row, at = divmod(int(place), n)
            begin = at - at % CHUNK_VALUES
            chunk = drawn[row, BYTES * begin : BYTES * (begin + CHUNK_VALUES)]
            noise = _decided(chunk, at - begin, pairs[row][1])
            row, at = row + rows.start, at + columns.start
            whole = min(max(np.rint(np.float64(before[row, at])), -SATURATION), SATURATION)
            part = np.searchsorted(stops, at, side="right")
            after[row, at] = (whole + noise) * lengths[row, part]


@lru_cache(maxsize=1)
def _packed() -> np.ndarray:
    return centre_table().packed.astype(np.uint32).view(np.int32)


def _decided(words: np.ndarray, at: int, extension: ByteStream) -> int:
    """Return the noise of a word that leaves the centre undecided, with bits of the extension."""
    n, table = len(words) // BYTES, centre_table()
    column = int(words[: 4 * n].view(np.uint32)[at] >> WORD_BITS)
    if not extended_below(table.extensions[column], extension):
        column = int(table.packed[column] >> WORD_BITS)
    uniforms = words[4 * n :].view(np.uint16).reshape(4, n)[:, at]
    return (column << UNIFORM_BITS) - _OFFSET + sum(map(int, uniforms))


def _release(
    words: np.ndarray,
    first_row: int,
    first: int,
    packed: np.ndarray,
    chosen: np.ndarray,
    sums: np.ndarray,
    stops: np.ndarray,
    lengths: np.ndarray,
    into: np.ndarray,
    undecided: np.ndarray,
) -> int:
    """Write scaled noisy sums to `into`, and return how many draws are undecided.

    A draw is undecided if the 19 bits of its word equal those of the threshold.

    Args:
        words: random words of k rows of n values (k, 12 · n), chunk after chunk, as in `spline`.
        first_row: number of the first of these rows in `sums`.
        first: number of the first of these columns in `sums`, a multiple of `CHUNK_VALUES`.
        packed: the table of centres.
        chosen: memory for the entries of the table for some values at once.
        sums: sums (K, d).
        stops: end of each part of the columns that has one scale.
        lengths: scale of each row and part (K, parts).
        into: the result (K, d).
        undecided: memory (k · n,) for the places row · n + column, in `words`, of these draws.
    """
    # Numba promotes 32-bit integers to 64 bits, which halves the SIMD lanes: so results are cast.
    count, size = 0, words.shape[1] // 12
    for row in range(words.shape[0]):
        part, start = 0, 0
        while start < size:
            while stops[part] <= first + start:
                part += 1
            chunk = start - start % CHUNK_VALUES
            n = min(CHUNK_VALUES, size - chunk)
            stop = min(start + chosen.shape[0], chunk + n, stops[part] - first)
            scale = lengths[first_row + row, part]
            line = words[row, 12 * chunk : 12 * (chunk + n)]
            seen = slice(start - chunk, stop - chunk)
            picks = line[: 4 * n].view(np.uint32)[seen]
            u1 = line[4 * n : 6 * n].view(np.uint16)[seen]
            u2 = line[6 * n : 8 * n].view(np.uint16)[seen]
            u3 = line[8 * n : 10 * n].view(np.uint16)[seen]
            u4 = line[10 * n :].view(np.uint16)[seen]
            total = sums[first_row + row][first + start : first + stop]
            out = into[first_row + row][first + start : first + stop]
            for i in range(stop - start):
                chosen[i] = packed[np.int64(picks[i] >> np.uint32(19))]
            equal = np.int32(0)
            for i in range(stop - start):
                word, entry = np.int32(picks[i]), chosen[i]
                low, limit = np.int32(word & np.int32(0x7FFFF)), np.int32(entry & np.int32(0x7FFFF))
                equal = np.int32(equal | np.int32(low == limit))
                column = word if low < limit else entry
                shifted = np.uint32(np.uint32(column) >> np.uint32(19))
                centre = np.int32(np.uint32(shifted << np.uint32(16)))
                left = np.int32(np.int32(u1[i]) + np.int32(u2[i]))
                uniform = np.int32(left + np.int32(np.int32(u3[i]) + np.int32(u4[i])))
                noise = np.int32(np.int32(centre - np.int32(_OFFSET)) + uniform)
                whole = min(max(np.rint(np.float64(total[i])), -SATURATION), SATURATION)
                out[i] = (whole + np.float64(noise)) * scale
            if equal != 0:
                for i in range(stop - start):
                    if (np.int32(picks[i]) ^ chosen[i]) & np.int32(0x7FFFF) == 0:
                        undecided[count] = row * size + start + i
                        count += 1
            start = stop
    return count


_PICKS = 1 << 12  # values, of which the entries of the table stay in the fastest cache
_OFFSET = (ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1)


class NoiseRangeError(ValueError):
    """Error: noise is so small or large that a floating-point dtype distorts its distribution."""


def check_deviations(
    deviations: Iterable[float], dtype: torch.dtype, name: str = "the standard deviation of noise"
) -> None:
    """Check that a dtype can represent noise of the given standard deviations, and sums of it.

    Guarantee: 2⁻²⁰ standard deviations are a normal number of the dtype, not a subnormal one, and
    the sum of 2²⁰ values of one standard deviation does not overflow. A deviation of 0 means no
    noise and passes. Privacy does not need this check: the dtype of a release is chosen after its
    noise. But a model trained with noise that underflows to 0, or overflows, is useless.

    Args:
        deviations: standard deviations of noise, or other magnitudes that the tensor must hold.
        dtype: dtype of the tensor.
        name: name of the deviations, with which the error message starts.

    Raises:
        NoiseRangeError: a deviation is outside the range; the message names the deviation and the
            range.
    """
    info = torch.finfo(dtype)
    low, high = info.tiny * _HEADROOM, info.max / _HEADROOM
    for deviation in deviations:
        if not (low <= deviation <= high or deviation == 0.0):
            raise NoiseRangeError(
                f"{name} is {deviation:.3g}; {str(dtype).removeprefix('torch.')} keeps the "
                f"normal distribution from {low:.2g} to {high:.2g} only"
            )


def normal_tail(chance: float) -> float:
    """Return the number of standard deviations that |N(0, 1)| exceeds with a given probability.

    Args:
        chance: the probability, between 0 and 1.
    """
    return -NormalDist().inv_cdf(chance / 2.0)


_HEADROOM = 2.0**20

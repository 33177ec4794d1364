"""Release of noisy sums in one pass over the values, compiled by numba (pip extra `fast`).

The results equal those of `release.release_` without numba to the last bit, since all operations
are on integers and float64. The compiled loop takes half the time, as intermediate results stay in
the processor's registers.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedsim.noise.grid import SATURATION
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
"""Number of released values from which on numba's start-up of about a second pays off."""

Kernel = Callable[..., Any]


class Demand:
    """Counter of the values that a process has released, which decides when to start numba.

    The decision changes only the speed, never a result.

    Attributes:
        values: number of values released so far.
    """

    def __init__(self) -> None:
        self.values = 0

    def kernel(self, values: int) -> Kernel | None:
        """Count values, and return the compiled loop; None for few values so far or without numba.

        Args:
            values: number of values of the next release.
        """
        self.values += values
        return kernel() if self.values >= LEAST_VALUES else None


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
    sums: np.ndarray,
    scales: Sequence[tuple[slice, Sequence[float]]],
    into: np.ndarray,
) -> None:
    """Write noisy sums, (clip(rint(sums)) + noise) · scale, into an array.

    Guarantee: the noise is that of `spline.fill_rows`, and the result has the same bits as without
    numba.

    Args:
        compiled: the compiled loop of `kernel`.
        streams: two keystreams of each row: random words for the draws, and extra bits for draws
            that a word leaves undecided.
        sums: sums (K, n) in grid steps (2⁻²⁴ standard deviations of the noise), contiguous.
        scales: pairs (slice of the n values, scale of these values for each of the K rows), in the
            order of the values.
        into: the result (K, n), contiguous; it must not share memory with `sums`.
    """
    words, chosen = np.empty(BYTES * min(sums.size, CHUNK_VALUES), np.uint8), np.empty(_BLOCK, "i4")
    stops = np.array([place.stop for place, _ in scales])
    lengths = np.array([length for _, length in scales])
    for rows, columns in chunks(*sums.shape):
        pairs, n = streams[rows], columns.stop - columns.start
        drawn = random_words([stream for stream, _ in pairs], n, words)
        block = sums[rows], columns.start, stops, lengths[:, rows]
        if compiled(drawn.reshape(-1), _packed(), chosen, *block, into[rows]):
            _settle(drawn, pairs, *block, into[rows])  # once in 2¹⁹ values


@lru_cache(maxsize=1)
def _packed() -> np.ndarray:
    return centre_table().packed.astype(np.uint32).view(np.int32)


def _settle(
    drawn: np.ndarray,
    pairs: Sequence[tuple[ByteStream, ByteStream]],
    sums: np.ndarray,
    first: int,
    stops: np.ndarray,
    lengths: np.ndarray,
    into: np.ndarray,
) -> None:
    """Overwrite the values of words whose 19 bits equal their threshold's, with the right noise."""
    n, table = drawn.shape[1] // BYTES, centre_table()
    picks = drawn[:, : 4 * n].view(np.uint32)
    columns = picks >> WORD_BITS
    for row, at in np.argwhere((picks ^ table.packed[columns]) & _LOW == 0):
        column = columns[row, at]
        if not extended_below(table.extensions[column], pairs[row][1]):
            column = table.packed[column] >> WORD_BITS
        uniforms = drawn[row, 4 * n :].view(np.uint16).reshape(4, n)[:, at]
        noise = (int(column) << UNIFORM_BITS) - _OFFSET + int(uniforms.sum(dtype=np.int64))
        whole = min(max(np.rint(np.float64(sums[row, first + at])), -SATURATION), SATURATION)
        scale = lengths[np.searchsorted(stops, first + at, side="right"), row]
        into[row, first + at] = (whole + noise) * scale


def _release(
    words: np.ndarray,
    packed: np.ndarray,
    chosen: np.ndarray,
    sums: np.ndarray,
    first: int,
    stops: np.ndarray,
    lengths: np.ndarray,
    into: np.ndarray,
) -> np.int32:
    """Write scaled noisy sums to `into`; return 1 if a word's 19 bits equal its threshold's.

    Args:
        words: random words of k rows of n values (12 · k · n,), as in `spline`.
        packed: the table of centres.
        chosen: memory for the entries of the table for some values at once.
        sums: sums (k, d), of which the columns from `first` on get noise.
        first: number of the first column.
        stops: end of each part of the columns that has one scale.
        lengths: scale of each part and row (parts, k).
        into: the result (k, d).
    """
    # Numba promotes 32-bit integers to 64 bits, which halves the SIMD lanes: so results are cast.
    equal, n = np.int32(0), words.shape[0] // (12 * sums.shape[0])
    for row in range(sums.shape[0]):
        line = words[row * 12 * n : (row + 1) * 12 * n]
        part, start = 0, 0
        while start < n:
            while stops[part] <= first + start:
                part += 1
            stop = min(start + chosen.shape[0], n, stops[part] - first)
            scale = lengths[part, row]
            picks = line[: 4 * n].view(np.uint32)[start:stop]
            u1 = line[4 * n : 6 * n].view(np.uint16)[start:stop]
            u2 = line[6 * n : 8 * n].view(np.uint16)[start:stop]
            u3 = line[8 * n : 10 * n].view(np.uint16)[start:stop]
            u4 = line[10 * n :].view(np.uint16)[start:stop]
            total = sums[row][first + start : first + stop]
            out = into[row][first + start : first + stop]
            for i in range(stop - start):
                chosen[i] = packed[np.int64(picks[i] >> np.uint32(19))]
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
            start = stop
    return equal


_BLOCK = 1 << 12  # values, of which the entries of the table stay in the fastest cache
_LOW = np.uint32((1 << WORD_BITS) - 1)
_OFFSET = (ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1)

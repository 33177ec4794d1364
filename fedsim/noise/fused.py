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
import torch
from torch import Tensor

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
"""Number of released values above which the start-up of numba, about a second, pays off."""

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
        """Add `values` to the number of released values; return the compiled noise loop or None.

        The result is None without numba, or while that number is below `LEAST_VALUES`.

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
    sums: Tensor,
    scales: Sequence[tuple[slice, Tensor]],
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
        scales: pairs (slice of the n values, their scale in each row, float64 (K, 1)), in order of
            the values.
        into: the result (K, n), contiguous; it must not share memory with `sums`.
    """
    size = min(sums.numel(), CHUNK_VALUES)
    words, chosen = np.empty(BYTES * size, np.uint8), np.empty(_BLOCK, np.int32)
    undecided = np.empty(size, np.int64)
    stops = np.array([place.stop for place, _ in scales])
    lengths = torch.cat([length.T for _, length in scales]).numpy()
    before, after = sums.numpy(), into.numpy()
    fixed = _packed(), chosen, before, stops, lengths, after, undecided
    for rows, columns in chunks(*sums.shape):
        pairs, n = streams[rows], columns.stop - columns.start
        drawn = random_words([stream for stream, _ in pairs], n, words)
        count = compiled(drawn, rows.start, columns.start, *fixed)
        for place in undecided[:count]:  # once in 2¹⁹ values
            row, at = divmod(int(place), n)
            noise = _decided(drawn[row], at, pairs[row][1])
            row, at = row + rows.start, at + columns.start
            whole = min(max(np.rint(np.float64(before[row, at])), -SATURATION), SATURATION)
            part = np.searchsorted(stops, at, side="right")
            after[row, at] = (whole + noise) * lengths[part, row]


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
    """Write scaled noisy sums of a chunk to `into`, and return how many draws are undecided.

    A draw is undecided if the 19 bits of its word equal those of the threshold.

    Args:
        words: random words of k rows of n values (k, 12 · n), as in `spline`.
        first_row: number of the chunk's first row in `sums`.
        first: number of the chunk's first column in `sums`.
        packed: the table of centres.
        chosen: memory for the entries of the table for some values at once.
        sums: sums (K, d).
        stops: end of each part of the columns that has one scale.
        lengths: scale of each part and row (parts, K).
        into: the result (K, d).
        undecided: memory (k · n,) for the places row · n + column, in the chunk, of these draws.
    """
    # Numba promotes 32-bit integers to 64 bits, which halves the SIMD lanes: so results are cast.
    count, n = 0, words.shape[1] // 12
    for row in range(words.shape[0]):
        line = words[row]
        part, start = 0, 0
        while start < n:
            while stops[part] <= first + start:
                part += 1
            stop = min(start + chosen.shape[0], n, stops[part] - first)
            scale = lengths[part, first_row + row]
            picks = line[: 4 * n].view(np.uint32)[start:stop]
            u1 = line[4 * n : 6 * n].view(np.uint16)[start:stop]
            u2 = line[6 * n : 8 * n].view(np.uint16)[start:stop]
            u3 = line[8 * n : 10 * n].view(np.uint16)[start:stop]
            u4 = line[10 * n :].view(np.uint16)[start:stop]
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
                        undecided[count] = row * n + start + i
                        count += 1
            start = stop
    return count


_BLOCK = 1 << 12  # values, of which the entries of the table stay in the fastest cache
_OFFSET = (ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1)

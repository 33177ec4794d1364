"""Release of noisy sums in one pass over the values, compiled by numba (pip extra `fast`).

The results equal those of `release.release_` without numba to the last bit, since all operations
are on integers and float64. The compiled loops take half the time, as intermediate results stay in
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
    UNIFORM_BITS,
    WORD_BITS,
    ZERO_COLUMN,
    ByteStream,
    Memory,
    centre_table,
    chunks,
    extended_below,
)

LEAST_VALUES = 1 << 24
"""Number of released values from which on numba's start-up of about a second pays off."""

Kernels = tuple[Callable[..., Any], Callable[..., Any]]


class Demand:
    """Counter of the values that a process has released, which decides when to start numba.

    The decision changes only the speed, never a result.

    Attributes:
        values: number of values released so far.
    """

    def __init__(self) -> None:
        self.values = 0

    def kernels(self, values: int) -> Kernels | None:
        """Count values, and return the compiled loops; None for few values so far or without numba.

        Args:
            values: number of values of the next release.
        """
        self.values += values
        return kernels() if self.values >= LEAST_VALUES else None


@lru_cache(maxsize=1)
def kernels() -> Kernels | None:
    """Return the two compiled loops: one looks up noise values, the other adds them to sums.

    The result is None without numba or on a big-endian processor.
    """
    if sys.byteorder != "little" or find_spec("numba") is None:
        return None
    from numba import njit

    try:
        compiled = njit(cache=True, error_model="numpy")
        return compiled(_choose), compiled(_add)
    except RuntimeError:  # no cache folder can be written, so each process compiles anew
        compiled = njit(error_model="numpy")
        return compiled(_choose), compiled(_add)


def release_rows(
    compiled: Kernels,
    streams: Sequence[tuple[ByteStream, ByteStream]],
    sums: np.ndarray,
    scales: Sequence[tuple[slice, Sequence[float]]],
    into: np.ndarray,
) -> None:
    """Write noisy sums, (clip(rint(sums)) + noise) · scale, into an array.

    Guarantee: the noise is that of `spline.fill_rows`, and the result has the same bits as without
    numba.

    Args:
        compiled: the compiled loops of `kernels`.
        streams: two keystreams of each row: random words for the draws, and extra bits for draws
            that a word leaves undecided.
        sums: sums (K, n) in grid steps (2⁻²⁴ standard deviations of the noise), contiguous in each
            row.
        scales: pairs (slice of the n values, scale of these values for each of the K rows).
        into: the result (K, n), contiguous in each row; it must not share memory with `sums`.
    """
    choose, add = compiled
    memory = Memory.of(sums.shape[1])
    for row, (stream, extension) in enumerate(streams):
        for _, columns in chunks(1, sums.shape[1]):
            n = columns.stop - columns.start
            words = memory.words_of([stream], n)[0]
            picks, uniforms = words[: 4 * n].view(np.uint32), words[4 * n :].view(np.uint16)
            planes = picks, *uniforms.reshape(4, n), memory.tables[0, :n].view(np.int32)
            choose(picks, _packed(), planes[-1])
            parts = [
                (part.start, part.stop, lengths[row])
                for place, lengths in scales
                if (part := _common(place, columns)).start < part.stop
            ]
            of_row = sums[row], into[row], columns.start
            if _add_parts(add, planes, parts, *of_row):  # once in 2¹⁹ values: settle and repeat
                _settle(picks, planes[-1].view(np.uint32), extension)
                _add_parts(add, planes, parts, *of_row)


def _add_parts(
    add: Callable[..., Any],
    planes: Sequence[np.ndarray],
    parts: Sequence[tuple[int, int, float]],
    sums: np.ndarray,
    into: np.ndarray,
    first: int,
) -> int:
    """Add the noise of a chunk from value `first` on; return 1 if a word equals its threshold."""
    equal = 0
    for start, stop, scale in parts:
        values = [plane[start - first : stop - first] for plane in planes]
        equal |= add(*values, sums[start:stop], scale, into[start:stop])
    return equal


def _common(left: slice, right: slice) -> slice:
    return slice(max(left.start, right.start), min(left.stop, right.stop))


@lru_cache(maxsize=1)
def _packed() -> np.ndarray:
    return centre_table().packed.astype(np.uint32).view(np.int32)


def _settle(picks: np.ndarray, chosen: np.ndarray, extension: ByteStream) -> None:
    """Decide the words whose 19 bits equal their threshold's, by further random bits."""
    table = centre_table()
    for i in np.flatnonzero((picks ^ chosen) & _LOW == 0):
        if extended_below(table.extensions[picks[i] >> WORD_BITS], extension):
            chosen[i] = picks[i]


def _choose(picks: np.ndarray, packed: np.ndarray, chosen: np.ndarray) -> None:
    """Write the entry of each word in the table of centres to `chosen`."""
    for i in range(picks.shape[0]):
        chosen[i] = packed[np.int64(picks[i] >> np.uint32(19))]


def _add(
    picks: np.ndarray,
    u1: np.ndarray,
    u2: np.ndarray,
    u3: np.ndarray,
    u4: np.ndarray,
    chosen: np.ndarray,
    sums: np.ndarray,
    scale: float,
    into: np.ndarray,
) -> np.int32:
    """Write each scaled noisy sum to `into`; return 1 if a word's 19 bits equal its threshold's."""
    # Numba promotes 32-bit integers to 64 bits, which halves the SIMD lanes: so results are cast.
    equal = np.int32(0)
    for i in range(picks.shape[0]):
        word, entry = np.int32(picks[i]), chosen[i]
        low, threshold = np.int32(word & np.int32(0x7FFFF)), np.int32(entry & np.int32(0x7FFFF))
        equal = np.int32(equal | np.int32(low == threshold))
        column = word if low < threshold else entry
        shifted = np.uint32(np.uint32(column) >> np.uint32(19))
        centre = np.int32(np.uint32(shifted << np.uint32(16)))
        left = np.int32(np.int32(u1[i]) + np.int32(u2[i]))
        uniform = np.int32(left + np.int32(np.int32(u3[i]) + np.int32(u4[i])))
        noise = np.int32(np.int32(centre - np.int32(_OFFSET)) + uniform)
        whole = min(max(np.rint(np.float64(sums[i])), -SATURATION), SATURATION)
        into[i] = (whole + np.float64(noise)) * scale
    return equal


_LOW = np.uint32((1 << WORD_BITS) - 1)
_OFFSET = (ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1)

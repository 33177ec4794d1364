"""Spline sampler: rounded normals of standard deviation 2²⁴ from integer operations only.

A value is

    Z = 2¹⁶ c + u₁ + u₂ + u₃ + u₄ - 2 (2¹⁶ - 1)

with uᵢ independent, uniform on 0 ... 2¹⁶ - 1, and c a discrete Gaussian on -4095 ... 4095. The four
uniforms are a cubic B-spline, so the law of Z is a spline that interpolates the normal density
between multiples of 2¹⁶. Its probabilities are those of rint(N(0, 2⁴⁸)) up to a factor 1 + r with
|r| about 2⁻³² |He₄(x)| / 384 at x standard deviations (docs/finite_precision.md);
`fedsim.accountant.sampler_slack` is what this costs.

A row of n values takes 12 n bytes of its keystream: n words of 4 bytes (13 bits are a column of the
table of centres, 19 bits are compared with its threshold), then four times n words of 2 bytes. All
are little-endian on every processor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from fedsim.noise.alias import EXTENSION_BITS, WORD_BITS, ZERO_COLUMN, centre_table

BYTES = 12  # of keystream for a value
UNIFORM_BITS = 16


class ByteStream(Protocol):
    """Random bytes, such as a `Keystream`."""

    def write(self, into: memoryview) -> None:
        """Overwrite `into` with the next bytes."""
        ...


def spline_integers(
    words: np.ndarray, extension: Callable[[int], ByteStream], into: np.ndarray
) -> None:
    """Convert random words to rounded normals of standard deviation 2²⁴.

    Guarantee: for independent uniform bytes, the values are independent, and each has the law of
    docs/finite_precision.md exactly. They are whole numbers below 2²⁸ + 2¹⁸ in size.

    Args:
        words: uint8 (rows, 12 · cols), C-contiguous; not changed.
        extension: the stream of row i, keyed apart from its words. 24 bytes are read where the 19
            bits of a word equal a threshold's, one value in 2¹⁹, in the order of the row's values.
        into: float64 (rows, cols), overwritten.
    """
    cols = into.shape[1]
    picks = words[:, : 4 * cols].view(_WORD)
    uniforms = [words[:, at * cols : (at + 2) * cols].view(_HALF) for at in (4, 6, 8, 10)]
    width = max(1, min(cols, _BLOCK_VALUES))
    height = _BLOCK_VALUES // width
    buffers = _Buffers.empty(min(height, len(into)) * width)
    for top in range(0, len(into), height):
        for start in range(0, cols, width):
            block = slice(top, top + height), slice(start, start + width)
            values = _centres(picks[block], top, extension, buffers)
            for plane in uniforms:
                values += plane[block]
            values -= _OFFSET  # modulo 2³²: the result is read as a signed number
            into[block] = values.view(np.int32)


@dataclass(frozen=True)
class _Buffers:
    """Memory for the intermediate results of a block: new memory is slow at first touch."""

    columns: np.ndarray
    entries: np.ndarray
    low: np.ndarray
    other: np.ndarray
    equal: np.ndarray

    @classmethod
    def empty(cls, size: int) -> Self:
        kinds = (np.intp, np.uint32, np.uint32, np.uint32, np.bool_)
        return cls(*(np.empty(size, dtype=kind) for kind in kinds))

    def shaped(self, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Return the five, cut to a block's shape."""
        every = (self.columns, self.entries, self.low, self.other, self.equal)
        return tuple(one[: math.prod(shape)].reshape(shape) for one in every)


def _centres(
    words: np.ndarray, top: int, extension: Callable[[int], ByteStream], buffers: _Buffers
) -> np.ndarray:
    """Return 2¹⁶ times the column of the centre that each word selects.

    Args:
        words: (rows, cols), little-endian.
        top: the first row's number.
        extension: the stream of a row.
        buffers: memory of at least as many values.

    Returns:
        uint32 (rows, cols), a part of `buffers`.
    """
    table = centre_table()
    columns, chosen, low, other, equal = buffers.shaped(words.shape)
    np.right_shift(words, WORD_BITS, out=columns)
    np.take(table.packed, columns, out=chosen, mode="wrap")  # the other modes check every column
    np.bitwise_and(words, _LOW, out=low)
    np.bitwise_and(chosen, _LOW, out=other)
    np.subtract(low, other, out=low)
    np.equal(low, 0, out=equal)
    # All ones where the word's 19 bits are below the threshold's: there the column itself.
    below = np.right_shift(low.view(np.int32), 31, out=low.view(np.int32)).view(np.uint32)
    if equal.any():
        for row, col in np.argwhere(equal):
            if extended_below(table.extensions[columns[row, col]], extension(top + int(row))):
                below[row, col] = _ALL_ONES
    np.bitwise_xor(words, chosen, out=other)
    np.bitwise_and(other, below, out=other)
    np.bitwise_xor(chosen, other, out=chosen)
    np.right_shift(chosen, WORD_BITS, out=chosen)
    return np.left_shift(chosen, UNIFORM_BITS, out=chosen)


def extended_below(threshold: int, stream: ByteStream) -> bool:
    """Return whether the next 192 bits of a stream are below the rest of a threshold."""
    drawn = bytearray(EXTENSION_BITS // 8)
    stream.write(memoryview(drawn))
    return int.from_bytes(drawn, "little") < threshold


_BLOCK_VALUES = 1 << 15  # values whose words and intermediate results fit into a core's cache
_WORD, _HALF = np.dtype("<u4"), np.dtype("<u2")
_ALL_ONES = np.uint32((1 << 32) - 1)
_LOW = np.uint32((1 << WORD_BITS) - 1)
# Column 0's multiple of 2¹⁶, and the mean of four uniforms.
_OFFSET = np.uint32((ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1))

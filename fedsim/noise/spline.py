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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from fedsim.noise.alias import EXTENSION_BITS, WORD_BITS, ZERO_COLUMN, centre_table

BYTES = 12  # of keystream for a value
UNIFORM_BITS = 16
CHUNK_VALUES = 1 << 15
"""Values of a row that are drawn at once: words and intermediate results stay in a core's cache."""


class ByteStream(Protocol):
    """Random bytes, such as a `Keystream`."""

    def write(self, into: memoryview) -> None:
        """Overwrite `into` with the next bytes."""
        ...


def fill_rows(streams: Sequence[tuple[ByteStream, ByteStream]], into: np.ndarray) -> None:
    """Fill each row with the next draws of its streams.

    Args:
        streams: of each row: its words, and the further bits that few of them need.
        into: float64 (rows, cols), overwritten.
    """
    memory = Memory.of(into.size)
    for rows, columns in chunks(*into.shape):
        own = streams[rows]
        words = memory.words_of([stream for stream, _ in own], columns.stop - columns.start)
        spline_integers(words, lambda row, own=own: own[row][1], into[rows, columns], memory)


def chunks(rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of a table of `CHUNK_VALUES` or less: whole rows where these are shorter."""
    width = min(max(1, cols), CHUNK_VALUES)
    height = CHUNK_VALUES // width
    for top in range(0, rows, height):
        for start in range(0, cols, width):
            yield slice(top, min(top + height, rows)), slice(start, min(start + width, cols))


@dataclass(frozen=True)
class Memory:
    """Memory for a chunk's words and its intermediate results: new memory is slow at first touch.

    Attributes:
        words: uint8.
        columns: of the table of centres.
        tables: three of uint32.
        equal: of bool.
    """

    words: np.ndarray
    columns: np.ndarray
    tables: np.ndarray
    equal: np.ndarray

    @classmethod
    def of(cls, values: int) -> Self:
        """Return memory for the chunks of so many values."""
        size = min(values, CHUNK_VALUES)
        tables = np.empty((3, size), np.uint32)
        return cls(
            np.empty(BYTES * size, np.uint8),
            np.empty(size, np.intp),
            tables,
            np.empty(size, np.bool_),
        )

    def words_of(self, streams: Sequence[ByteStream], columns: int) -> np.ndarray:
        """Return the words of the next draws of each stream, uint8 (rows, 12 · columns)."""
        words = self.words[: len(streams) * BYTES * columns].reshape(len(streams), BYTES * columns)
        for stream, line in zip(streams, words, strict=True):
            stream.write(line.data)
        return words

    def shaped(self, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Return the columns, the three tables and the bits, cut to a shape."""
        every = (self.columns, *self.tables, self.equal)
        return tuple(one[: math.prod(shape)].reshape(shape) for one in every)


def spline_integers(
    words: np.ndarray,
    extension: Callable[[int], ByteStream],
    into: np.ndarray,
    memory: Memory,
) -> None:
    """Convert random words to rounded normals of standard deviation 2²⁴.

    Guarantee: for independent uniform bytes, the values are independent, and each has the law of
    docs/finite_precision.md exactly. They are whole numbers below 2²⁸ + 2¹⁸ in size.

    Args:
        words: uint8 (rows, 12 · cols), C-contiguous; not changed.
        extension: the stream of row i, keyed apart from its words. 24 bytes are read where the 19
            bits of a word equal a threshold's, one value in 2¹⁹, in the order of the row's values.
        into: float64 (rows, cols), at most a chunk; overwritten.
        memory: for at least as many values.
    """
    cols = into.shape[1]
    values = _centres(words[:, : 4 * cols].view(_WORD), extension, memory)
    for at in (4, 6, 8, 10):
        values += words[:, at * cols : (at + 2) * cols].view(_HALF)
    values -= _OFFSET  # modulo 2³²: the result is read as a signed number
    into[:] = values.view(np.int32)


def _centres(
    words: np.ndarray, extension: Callable[[int], ByteStream], memory: Memory
) -> np.ndarray:
    """Return 2¹⁶ times the column of the centre that each word selects.

    Args:
        words: (rows, cols), little-endian.
        extension: the stream of a row.
        memory: for at least as many values.

    Returns:
        uint32 (rows, cols), a part of `memory`.
    """
    table = centre_table()
    columns, chosen, low, other, equal = memory.shaped(words.shape)
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
            if extended_below(table.extensions[columns[row, col]], extension(int(row))):
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


_WORD, _HALF = np.dtype("<u4"), np.dtype("<u2")
_ALL_ONES = np.uint32((1 << 32) - 1)
_LOW = np.uint32((1 << WORD_BITS) - 1)
# Column 0's multiple of 2¹⁶, and the mean of four uniforms.
_OFFSET = np.uint32((ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1))

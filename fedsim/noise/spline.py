"""Spline sampler: rounded normals of standard deviation 2²⁴ from integer operations only.

A value is

    Z = 2¹⁶ c + u₁ + u₂ + u₃ + u₄ - 2 (2¹⁶ - 1)

with uᵢ independent, uniform on 0 ... 2¹⁶ - 1, and c a discrete Gaussian on -4095 ... 4095. The four
uniforms are a cubic B-spline, so the law of Z is a spline that interpolates the normal density
between multiples of 2¹⁶. Its probabilities are those of rint(N(0, 2⁴⁸)) up to a factor 1 + r with
|r| about 2⁻³² |He₄(x)| / 384 at x standard deviations (docs/explain/proofs.md);
`fedsim.accountant.sampler_slack` is what this costs.

The centres c are drawn by Walker's alias method. A column of the table holds two centres and a
threshold between them. A uniform column and a uniform number below the column's capacity select a
centre. Every probability is a whole number of 2⁻²²⁴. The table is made by integer arithmetic of any
length: the same on every processor.

A row of n values takes 12 n bytes of its keystream: n words of 4 bytes (13 bits are a column of the
table of centres, 19 bits are compared with its threshold), then four times n words of 2 bytes. All
are little-endian on every processor.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

INDEX_BITS = 13
WORD_BITS = 19  # of a threshold: with the index, one 32-bit word
EXTENSION_BITS = 192  # of a threshold: read only where the first 19 bits are equal
MAX_CENTRE = (1 << INDEX_BITS - 1) - 1
ZERO_COLUMN = MAX_CENTRE + 1  # column i is of centre i - ZERO_COLUMN; column 0 has weight 0


@dataclass(frozen=True)
class CentreTable:
    """Alias table of 8,192 columns.

    Attributes:
        packed: uint32 (8192,), read-only: the other centre's column · 2¹⁹ + the first 19 bits of
            the threshold.
        extensions: the other 192 bits of each threshold.
    """

    packed: np.ndarray
    extensions: tuple[int, ...]


@functools.cache
def centre_table() -> CentreTable:
    """Return the table of the centres; computed at the first call, in about 20 ms.

    Guarantee: the total variation distance to the discrete Gaussian, cut off at ±4095, is below
    2⁻²¹⁰.
    """
    weights = discrete_gaussian(*CENTRE_VARIANCE, MAX_CENTRE, _TOTAL_BITS)
    thresholds, others = alias_columns([0, *weights], 1 << WORD_BITS + EXTENSION_BITS)
    words = [
        other << WORD_BITS | threshold >> EXTENSION_BITS
        for threshold, other in zip(thresholds, others, strict=True)
    ]
    packed = np.array(words, dtype=np.uint32)
    packed.flags.writeable = False
    return CentreTable(packed, tuple(one & (1 << EXTENSION_BITS) - 1 for one in thresholds))


def discrete_gaussian(numerator: int, denominator: int, limit: int, bits: int) -> list[int]:
    """Return integer weights of a discrete Gaussian on -limit ... limit; their sum is 2^bits.

    Each weight is rounded down, and the rest goes to 0: the total variation distance to the
    Gaussian on these integers is below (2 · limit + 2) 2^-bits.

    Args:
        numerator: of the Gaussian's variance parameter.
        denominator: of the same; the parameter is at least 1.
        limit: the largest integer.
        bits: the sum's logarithm.
    """
    # exp(-(c + 1)² h) = exp(-c² h) exp(-(2c + 1) h) with h = 1 / (2 variance).
    precision = bits + 4 * limit.bit_length() + 32  # errors grow as c²
    ratio = _exp_minus(denominator, 2 * numerator, precision)
    step = _exp_minus(denominator, numerator, precision)
    half = [1 << precision]
    for _ in range(limit):
        half.append(half[-1] * ratio >> precision)
        ratio = ratio * step >> precision
    total = 2 * sum(half) - half[0]
    half = [(one << bits) // total for one in half]
    half[0] += (1 << bits) - (2 * sum(half) - half[0])
    return [*half[:0:-1], *half]


def alias_columns(weights: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
    """Return threshold and other index of each column (Walker 1977; Vose 1991).

    Column i gives i with `threshold` of `capacity` parts, and the other index otherwise.

    Guarantee: exact. The parts of every index over all columns add up to its weight.

    Args:
        weights: whole numbers; their sum is capacity · len(weights).
        capacity: of a column.

    Raises:
        ValueError: the weights have another sum.
    """
    if sum(weights) != capacity * len(weights):
        raise ValueError("the weights must add up to the capacity of all columns")
    left, others = list(weights), list(range(len(weights)))
    thresholds = [0] * len(weights)  # a full column gives its own index twice
    small = [index for index, weight in enumerate(left) if weight < capacity]
    large = [index for index, weight in enumerate(left) if weight > capacity]
    while small:
        column, giver = small.pop(), large[-1]
        thresholds[column], others[column] = left[column], giver
        left[giver] -= capacity - left[column]
        if left[giver] <= capacity:
            large.pop()
        if left[giver] < capacity:
            small.append(giver)
    return thresholds, others


def _exp_minus(numerator: int, denominator: int, precision: int) -> int:
    """Return exp(-numerator / denominator) · 2^precision, within 2⁵; the quotient is at most 1."""
    total, term, order = 0, 1 << precision, 0
    while term:
        total += -term if order % 2 else term
        order += 1
        term = term * numerator // (denominator * order)
    return total


# 2¹⁶ times the centre and four uniforms of variance (2³² - 1) / 12 have the variance 2⁴⁸ + 1/12 of
# the rounded normal. Parameter and variance of a discrete Gaussian as wide as this differ by less
# than e^(-10⁶).
CENTRE_VARIANCE = (12 * 2**48 - 4 * 2**32 + 5, 12 * 2**32)
_TOTAL_BITS = INDEX_BITS + WORD_BITS + EXTENSION_BITS


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
    docs/explain/proofs.md exactly. They are whole numbers below 2²⁸ + 2¹⁸ in size.

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

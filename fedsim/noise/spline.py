"""Spline sampler of rounded normals of standard deviation 2²⁴, by integer operations only.

A value is

    Z = 2¹⁶ c + u₁ + u₂ + u₃ + u₄ - 2 (2¹⁶ - 1)

with uᵢ independent, uniform on 0 ... 2¹⁶ - 1, and the centre c a discrete Gaussian on -4095 ...
4095. The sum of the four uniforms has a cubic B-spline as its distribution. So the distribution of
Z is a spline that interpolates the normal density between multiples of 2¹⁶. Its probabilities are
those of rint(N(0, 2⁴⁸)) up to a factor 1 + r. |r| is about 2⁻³² |He₄(x)| / 384 at x standard
deviations, with the Hermite polynomial He₄ (docs/explain/proofs.md).
`fedsim.accountant.sampler_slack` computes the cost of r in ε and δ.

The centres are drawn by Walker's alias method. Each column of the method's table holds two centres
and a threshold. A draw takes a uniform column and a uniform number: the number selects the first
centre if it is below the threshold, otherwise the second. Every probability is a multiple of 2⁻²²⁴.
The table is computed in integers of unlimited length, so it is the same on every processor.

A row of n values takes 12 n bytes of its keystream. First come n words of 4 bytes: 13 bits select a
column of the table, 19 bits are compared with its threshold. Then come four times n words of 2
bytes. All words are little-endian on every processor.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

INDEX_BITS = 13
WORD_BITS = 19  # first bits of a threshold; with the index they are a 32-bit word
EXTENSION_BITS = 192  # further bits of a threshold, needed only where the first 19 bits are equal
MAX_CENTRE = (1 << INDEX_BITS - 1) - 1
ZERO_COLUMN = MAX_CENTRE + 1  # column i is centre i - ZERO_COLUMN; column 0 has weight 0


@dataclass(frozen=True)
class CentreTable:
    """Alias table, with 8,192 columns, from which the sampler draws centres of noise values.

    A noise value is 2¹⁶ times its centre, plus four uniform numbers, minus their mean.

    Attributes:
        packed: uint32 (8192,), read-only, one number for each column: the index of the column's
            second centre times 2¹⁹, plus the first 19 bits of the threshold.
        extensions: the last 192 bits of each threshold.
    """

    packed: np.ndarray
    extensions: tuple[int, ...]


@functools.cache
def centre_table() -> CentreTable:
    """Return the alias table from which the sampler draws the centre of each noise value.

    The first call computes the table in 20 ms.

    Guarantee: the total variation distance of the centres to the discrete Gaussian, cut off at
    ±4095, is below 2⁻²¹⁰.
    """
    weights = discrete_gaussian(*CENTRE_VARIANCE, MAX_CENTRE, _TOTAL_BITS)
    thresholds, others = alias_columns([0, *weights], 1 << WORD_BITS + EXTENSION_BITS)
    words = [
        other << WORD_BITS | threshold >> EXTENSION_BITS
        for threshold, other in zip(thresholds, others, strict=True)
    ]
    packed = np.array(words, dtype=np.uint32)
    packed.flags.writeable = False
    return CentreTable(packed, tuple(bits & (1 << EXTENSION_BITS) - 1 for bits in thresholds))


def discrete_gaussian(numerator: int, denominator: int, limit: int, bits: int) -> list[int]:
    """Return integer weights of a discrete Gaussian on -limit ... limit that add up to 2^bits.

    Each weight is rounded down, and the remainder is added to the weight of 0. So the total
    variation distance to the Gaussian on these integers is below (2 · limit + 2) 2^-bits.

    Args:
        numerator: numerator of the Gaussian's variance parameter, which is at least 1.
        denominator: denominator of the variance parameter.
        limit: the largest integer.
        bits: binary logarithm of the sum of the weights.
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
    half = [(weight << bits) // total for weight in half]
    half[0] += (1 << bits) - (2 * sum(half) - half[0])
    return [*half[:0:-1], *half]


def alias_columns(weights: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
    """Return the columns of Walker's alias method as two lists: thresholds and second indices.

    Column i selects index i with probability threshold / capacity, and otherwise its second index.

    Guarantee: the method is exact, as the weights of an index in all columns sum to its weight.

    Args:
        weights: weight of each index, a whole number; their sum is capacity · len(weights).
        capacity: total weight in one column: that of its own index plus that of its second index.

    Raises:
        ValueError: the sum of the weights is not capacity · len(weights).

    Source: Walker 1977; Vose 1991.
    """
    if sum(weights) != capacity * len(weights):
        raise ValueError("the weights must add up to the capacity of all columns")
    left, others = list(weights), list(range(len(weights)))
    thresholds = [0] * len(weights)  # a full column has its index twice, so any threshold fits
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
    """Return exp(-quotient) · 2^precision, within 2⁵, for a quotient of at most 1."""
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


BYTES = 12  # bytes of keystream for a value
UNIFORM_BITS = 16
CHUNK_VALUES = 1 << 15
"""Number of values computed at once, so that intermediate results stay in a core's cache."""


class ByteStream(Protocol):
    """Stream of random bytes, such as a `Keystream`."""

    def write(self, into: memoryview) -> None:
        """Overwrite a buffer with the next bytes of the stream."""
        ...


def fill_rows(streams: Sequence[tuple[ByteStream, ByteStream]], into: np.ndarray) -> None:
    """Fill each row of an array with the next noise values from the row's two streams.

    Args:
        streams: two streams of each row: random words for the draws, and extra bits for undecided
            draws.
        into: array (rows, cols), float64, to overwrite.
    """
    memory = Memory.of(into.size)
    for rows, columns in chunks(*into.shape, most=CHUNK_VALUES):
        pairs = streams[rows]
        count = columns.stop - columns.start
        words = random_words([stream for stream, _ in pairs], count, memory.words)
        spline_integers(words, lambda row, pairs=pairs: pairs[row][1], into[rows, columns], memory)


def chunks(rows: int, cols: int, *, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, columns) that cut a table into parts of at most `most` values.

    A part consists of whole rows if a row has at most that many values.

    Args:
        rows: number of rows of the table.
        cols: number of columns.
        most: largest number of values of a part.
    """
    width = min(max(1, cols), most)
    height = most // width
    for top in range(0, rows, height):
        for start in range(0, cols, width):
            yield slice(top, min(top + height, rows)), slice(start, min(start + width, cols))


def random_words(streams: Sequence[ByteStream], columns: int, memory: np.ndarray) -> np.ndarray:
    """Return the next random words of each stream, uint8 (rows, 12 · columns).

    Args:
        streams: a stream of random bytes for each row.
        columns: number of values in each row.
        memory: array of at least 12 · rows · columns bytes, of which the result is a view.
    """
    words = memory[: len(streams) * BYTES * columns].reshape(len(streams), BYTES * columns)
    for stream, line in zip(streams, words, strict=True):
        stream.write(line.data)
    return words


@dataclass(frozen=True)
class Memory:
    """Reusable work arrays for up to `size` noise values; allocating new memory would be slow.

    Attributes:
        words: random words as bytes, uint8 (12 · size,).
        columns: column of the table of centres for each value, (size,).
        tables: three arrays of intermediate results, uint32 (3, size).
        equal: whether the compared bits of each word equal those of its threshold, bool (size,).
    """

    words: np.ndarray
    columns: np.ndarray
    tables: np.ndarray
    equal: np.ndarray

    @classmethod
    def of(cls, values: int) -> Self:
        """Return work arrays for the chunks of a table with `values` values in total."""
        size = min(values, CHUNK_VALUES)
        tables = np.empty((3, size), np.uint32)
        return cls(
            np.empty(BYTES * size, np.uint8),
            np.empty(size, np.intp),
            tables,
            np.empty(size, np.bool_),
        )

    def shaped(self, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Return views with the given shape of five arrays: `columns`, the `tables`, `equal`."""
        every = (self.columns, *self.tables, self.equal)
        return tuple(array[: math.prod(shape)].reshape(shape) for array in every)


def spline_integers(
    words: np.ndarray,
    extension: Callable[[int], ByteStream],
    into: np.ndarray,
    memory: Memory,
) -> None:
    """Convert random words to rounded normals of standard deviation 2²⁴.

    Guarantee: for independent uniform bytes, the values are independent, and each has exactly the
    distribution in docs/explain/proofs.md. They are whole numbers below 2²⁸ + 2¹⁸ in size.

    Args:
        words: random words, uint8 (rows, 12 · cols), C-contiguous; not changed.
        extension: function that returns the stream of extra bits of row i, made with another key
            than the words. A draw is undecided if 19 bits of its word equal those of the threshold
            (one value in 2¹⁹). For each of these, 24 bytes are read, in the order of the row's
            values.
        into: array (rows, cols), float64, to overwrite; at most `CHUNK_VALUES` values.
        memory: work arrays for at least as many values as `into` has.
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
        words: 32-bit words (rows, cols), little-endian.
        extension: returns the stream of further bits of a row.
        memory: memory for at least as many values.

    Returns:
        The products, uint32 (rows, cols), as a view of `memory`.
    """
    table = centre_table()
    columns, chosen, low, other, equal = memory.shaped(words.shape)
    np.right_shift(words, WORD_BITS, out=columns)
    np.take(table.packed, columns, out=chosen, mode="wrap")  # the other modes check every column
    np.bitwise_and(words, _LOW, out=low)
    np.bitwise_and(chosen, _LOW, out=other)
    np.subtract(low, other, out=low)
    np.equal(low, 0, out=equal)
    # All ones where the word's 19 bits are below the threshold's, which selects the column itself.
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
    """Return whether the next 192 bits of a stream are below the last 192 bits of a threshold.

    Args:
        threshold: the last 192 bits of the threshold.
        stream: random bytes, of which 24 are read.
    """
    drawn = bytearray(EXTENSION_BITS // 8)
    stream.write(memoryview(drawn))
    return int.from_bytes(drawn, "little") < threshold


_WORD, _HALF = np.dtype("<u4"), np.dtype("<u2")
_ALL_ONES = np.uint32((1 << 32) - 1)
_LOW = np.uint32((1 << WORD_BITS) - 1)
# Column 0's multiple of 2¹⁶, and the mean of four uniforms.
_OFFSET = np.uint32((ZERO_COLUMN << UNIFORM_BITS) + 2 * ((1 << UNIFORM_BITS) - 1))

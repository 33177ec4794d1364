"""The table of the spline sampler's centres: a discrete Gaussian by Walker's alias method.

A column of the table holds two centres and a threshold between them. A uniform column and a uniform
number below the column's capacity select a centre. Every probability is a whole number of 2⁻²²⁴.

Everything is integer arithmetic of any length: the same table on every processor.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

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

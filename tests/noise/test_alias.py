"""The table of centres: its law against high precision, and mutants that it must be told from."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest

from fedsim.noise import spline
from fedsim.noise.spline import (
    CENTRE_VARIANCE,
    CentreTable,
    alias_columns,
    centre_table,
    discrete_gaussian,
)

BOUND = 2.0**-210


def law_of(table: CentreTable) -> list[int]:
    """Return the probability of each column's centre in units of 2^-224, from packed words."""
    weights = [0] * 8192
    for column, (word, extension) in enumerate(zip(table.packed, table.extensions, strict=True)):
        other, low = divmod(int(word), 1 << 19)
        threshold = (low << 192) + extension
        weights[column] += threshold
        weights[other] += 2**211 - threshold
    return weights


def distance(table: CentreTable) -> float:
    """Return the total variation distance to the discrete Gaussian on -4095 ... 4095, by mpmath."""
    weights, exact = law_of(table), exact_units()
    apart = sum(abs((weight << 100) - one) for weight, one in zip(weights[1:], exact, strict=True))
    return float(Fraction(apart + (abs(weights[0]) << 100), 1 << 325))


@cache
def exact_units() -> list[int]:
    """Return the exact probabilities of -4095 ... 4095 in units of 2^-324, by mpmath."""
    with mpmath.workdps(110):
        variance = mpmath.mpf(2) ** 16 - mpmath.mpf(1) / 3 + mpmath.mpf(5) / 12 / 2**32
        half = [mpmath.exp(-c * c / (2 * variance)) for c in range(4096)]
        total = 2 * mpmath.fsum(half) - 1
        units = [int(mpmath.nint(one / total * mpmath.mpf(2) ** 324)) for one in half]
    return [units[abs(c)] for c in range(-4095, 4096)]


def test_the_law_of_the_table() -> None:
    table = centre_table()
    assert sum(law_of(table)) == 2**224
    assert law_of(table)[0] == 0
    assert distance(table) < BOUND


def test_the_variance_is_that_of_the_rounded_normal() -> None:
    centre = Fraction(*CENTRE_VARIANCE)
    uniform = Fraction(2**32 - 1, 12)
    assert 2**32 * centre + 4 * uniform == 2**48 + Fraction(1, 12)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        centre_table().packed[0] = 1
    assert centre_table() is centre_table()


def rebuilt(weights: list[int]) -> CentreTable:
    thresholds, others = alias_columns([0, *weights], 2**211)
    words = [b << 19 | a >> 192 for a, b in zip(thresholds, others, strict=True)]
    return CentreTable(np.array(words, np.uint32), tuple(a % 2**192 for a in thresholds))


def other_variance() -> CentreTable:
    numerator, denominator = CENTRE_VARIANCE
    return rebuilt(
        discrete_gaussian(numerator * (10**9 + 1), denominator * 10**9, spline.MAX_CENTRE, 224)
    )


def float_weights() -> CentreTable:
    variance = CENTRE_VARIANCE[0] / CENTRE_VARIANCE[1]
    weights = np.exp(-(np.arange(-4095.0, 4096.0) ** 2) / (2 * variance))
    whole = [int(one) for one in weights / weights.sum() * 2.0**224]
    whole[4095] += 2**224 - sum(whole)
    return rebuilt(whole)


def short_thresholds() -> CentreTable:
    return CentreTable(centre_table().packed, (0,) * 8192)


def changed(column: int, word: int = 0, extension: int = 0) -> CentreTable:
    table = centre_table()
    packed, extensions = table.packed.copy(), list(table.extensions)
    packed[column] += word
    extensions[column] += extension
    return CentreTable(packed, tuple(extensions))


def one_threshold() -> CentreTable:
    return changed(5000, word=1)


def a_far_threshold() -> CentreTable:
    return changed(3, word=1)


def one_extension() -> CentreTable:
    return changed(5000, extension=2**16)


def one_alias() -> CentreTable:
    return changed(5000, word=2**19)


@pytest.mark.parametrize(
    "mutant",
    [
        other_variance,
        float_weights,
        short_thresholds,
        one_threshold,
        a_far_threshold,
        one_extension,
        one_alias,
    ],
)
def test_a_slightly_wrong_table_is_seen(mutant: Callable[[], CentreTable]) -> None:
    assert distance(mutant()) > BOUND


@pytest.mark.parametrize("weights", [[8], [0, 16], [5, 11, 8], [24, 0, 0], [1, 2, 3, 26], [8] * 4])
def test_every_draw_of_a_small_table(weights: list[int]) -> None:
    """All columns and all numbers below the capacity: each index as often as its weight."""
    thresholds, others = alias_columns(weights, 8)
    counts = [0] * len(weights)
    for column, number in itertools.product(range(len(weights)), range(8)):
        counts[column if number < thresholds[column] else others[column]] += 1
    assert counts == weights


def test_weights_of_another_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        alias_columns([1, 2], 2)


@pytest.mark.parametrize(("variance", "limit"), [((1, 1), 4), ((7, 3), 9), ((1000, 1), 200)])
def test_a_discrete_gaussian_of_any_variance(variance: tuple[int, int], limit: int) -> None:
    weights = discrete_gaussian(*variance, limit, 100)
    assert sum(weights) == 2**100
    with mpmath.workdps(60):
        value = mpmath.mpf(variance[0]) / variance[1]
        exact = [mpmath.exp(-c * c / (2 * value)) for c in range(-limit, limit + 1)]
        total = mpmath.fsum(exact)
        apart = mpmath.fsum(
            abs(one - w / total * 2**100) for one, w in zip(weights, exact, strict=True)
        )
        assert apart / 2 < 2 * limit + 2

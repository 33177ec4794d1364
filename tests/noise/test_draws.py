"""Draws of the sampler against the exact probabilities of the rounded normal.

The keys are fixed, so a test passes always or never. Each p-value is compared with 1e-6: for all of
them a right sampler and a new key would fail once in 10⁴.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from fedsim.core.streams import Keystream
from fedsim.noise import spline

DEVIATION = 2**24
ALARM = 1e-6
CHUNK = 1 << 16
CELL_BITS = 18  # a cell is 2¹⁸ integers, 1/64 of a deviation
ENDS = np.arange(-1024, 1025) << CELL_BITS
Draw = Callable[[int], np.ndarray]


def spline_draw(key: int) -> Draw:
    streams = Keystream(bytes([key]) * 32), Keystream(bytes([key + 1]) * 32)

    def draw(size: int) -> np.ndarray:
        into = np.empty((1, size))
        spline.fill_rows([streams], into)
        return into[0]

    return draw


class Counts:
    """What is counted of many draws."""

    def __init__(self, draw: Draw, size: int) -> None:
        self.size = 0
        self.cells = np.zeros(2048, np.int64)
        self.low = np.zeros((16, 64), np.int64)  # size in half deviations, the last 6 bits
        self.moments = np.zeros(2)
        self.products = np.zeros(2)  # of neighbours, and of both halves of a chunk
        while self.size < size:
            values = draw(CHUNK)
            whole = values.astype(np.int64)
            assert (whole == values).all()
            self.cells += np.bincount((whole >> CELL_BITS) + 1024, minlength=2048)
            bands = np.minimum(np.abs(whole) >> 23, 15)
            self.low += np.bincount(bands * 64 + (whole & 63), minlength=1024).reshape(16, 64)
            scaled = values / DEVIATION
            self.moments += scaled.sum(), (scaled**2).sum()
            self.products += scaled[1:] @ scaled[:-1], scaled[CHUNK // 2 :] @ scaled[: CHUNK // 2]
            self.size += CHUNK


def cell_probabilities() -> np.ndarray:
    """Return the probability of each cell under rint(N(0, 2⁴⁸)), from the nearer tail."""
    edges = (np.append(ENDS, ENDS[-1] + 1)[:2049] - 0.5) / DEVIATION
    lower, upper = ndtr(edges), ndtr(-edges)
    chances = np.where(edges[1:] <= 0, np.diff(lower), -np.diff(upper))
    chances[0] += lower[0]
    chances[-1] += upper[-1]
    return chances


def chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    """Return the p-value of counts; cells of fewer than 10 expected are added to a neighbour."""
    expected = chances * counts.sum()
    last, merged = 0, []
    for end in range(1, len(counts) + 1):
        enough = expected[last:end].sum() >= 10
        if enough and (end == len(counts) or expected[end:].sum() >= 10):
            merged.append((counts[last:end].sum(), expected[last:end].sum()))
            last = end
    found, right = np.array(merged).T
    assert found.sum() == counts.sum()
    return float(stats.chi2.sf(((found - right) ** 2 / right).sum(), len(found) - 1))


def quarters(of_cells: np.ndarray) -> np.ndarray:
    """Return four cells of about a quarter each: up to -43/64 deviations, 0 and 43/64."""
    return np.add.reduceat(of_cells, [0, 1024 - 43, 1024, 1024 + 43])


def check(counts: Counts) -> None:
    n = counts.size
    chances = cell_probabilities()
    assert chi_square(counts.cells, chances) > ALARM
    assert chi_square(quarters(counts.cells), quarters(chances)) > ALARM
    for cells in counts.low:  # every residue as often, in the body and in the tail
        if cells.sum() > 640:
            assert chi_square(cells, np.full(64, 1 / 64)) > ALARM
    beyond = np.array([counts.cells[: 1024 - 64 * x].sum() for x in (4, 5, 6)])
    beyond += [counts.cells[1024 + 64 * x :].sum() for x in (4, 5, 6)]
    for found, chance in zip(beyond, 2 * ndtr([-4.0, -5.0, -6.0]), strict=True):
        assert stats.binomtest(int(found), n, chance).pvalue > ALARM
    assert abs(counts.moments[0]) < 5 * np.sqrt(n)
    assert abs(counts.moments[1] - n) < 5 * np.sqrt(2 * n)
    assert abs(counts.products[0]) < 5 * np.sqrt(n)
    assert abs(counts.products[1]) < 5 * np.sqrt(n / 2)


@pytest.mark.parametrize(
    ("size", "key", "error"),
    [(10**6, 11, 0.02), pytest.param(10**8, 21, 0.002, marks=pytest.mark.long)],
)
def test_draws_have_the_law_of_the_rounded_normal(size: int, key: int, error: float) -> None:
    """Rejected, too: one cell of a quarter is wrong by this part of its probability.

    The chi-square of 3 degrees has a noncentrality of 75, so it passes once in 1,800.
    """
    counts = Counts(spline_draw(key), size)
    check(counts)
    for cell in range(4):
        wrong = quarters(cell_probabilities())
        wrong[cell] *= 1 + error
        assert chi_square(quarters(counts.cells), wrong / wrong.sum()) < ALARM


def test_rounded_float32_normals_are_rejected() -> None:
    """What the grid's low bits tell: floats above 1 deviation are multiples of 2, or more."""

    def rounded(size: int) -> np.ndarray:
        return np.rint(
            (spline_draw(31)(size) / DEVIATION).astype(np.float32).astype(float) * DEVIATION
        )

    counts = Counts(rounded, 2 * CHUNK)
    assert chi_square(counts.low[2], np.full(64, 1 / 64)) < 1e-100

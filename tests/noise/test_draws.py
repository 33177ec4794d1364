"""Draws of both samplers against the exact probabilities of the rounded normal.

The keys are fixed, so a test passes always or never. Each p-value is compared with 1e-6: for all of
them a right sampler and a new key would fail once in 10⁴.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from fedsim.noise import simulated, spline
from fedsim.noise.keystream import Keystream

DEVIATION = 2**24
ALARM = 1e-6
CHUNK = 1 << 16
CELL_BITS = 18  # a cell is 2¹⁸ integers, 1/64 of a deviation
ENDS = np.arange(-1024, 1025) << CELL_BITS
Draw = Callable[[int], np.ndarray]


def spline_draw(key: int) -> Draw:
    words_of, further = Keystream(bytes([key]) * 32), Keystream(bytes([key + 1]) * 32)

    def draw(size: int) -> np.ndarray:
        words, into = np.empty((1, spline.BYTES * size), np.uint8), np.empty((1, size))
        words_of.write(words[0].data)
        spline.spline_integers(words, lambda _: further, into)
        return into[0]

    return draw


def simulated_draw(key: int) -> Draw:
    words_of = Keystream(bytes([key]) * 16)

    def draw(size: int) -> np.ndarray:
        words = np.empty((1, simulated.BYTES * (size + size % 2)), np.uint8)
        into = np.empty((1, size))
        words_of.write(words[0].data)
        simulated.simulated_integers(words, into)
        return into[0]

    return draw


BOTH = pytest.mark.parametrize("source", [spline_draw, simulated_draw])


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


@BOTH
def test_a_million_draws(source: Callable[[int], Draw]) -> None:
    check(Counts(source(11), 10**6))


@pytest.mark.slow
@BOTH
def test_four_hundred_million_draws(source: Callable[[int], Draw]) -> None:
    """Rejected, too: one cell of a quarter is wrong by 1e-3 of its probability.

    The chi-square of 3 degrees has a noncentrality of 75, so it passes once in 1,800.
    """
    counts = Counts(source(21), 4 * 10**8)
    check(counts)
    for cell in range(4):
        wrong = quarters(cell_probabilities())
        wrong[cell] *= 1.001
        assert chi_square(quarters(counts.cells), wrong / wrong.sum()) < ALARM


@BOTH
def test_rounded_float32_normals_are_rejected(source: Callable[[int], Draw]) -> None:
    """What the grid's low bits tell: floats above 1 deviation are multiples of 2, or more."""

    def rounded(size: int) -> np.ndarray:
        return np.rint((source(31)(size) / DEVIATION).astype(np.float32).astype(float) * DEVIATION)

    counts = Counts(rounded, 2 * CHUNK)
    assert chi_square(counts.low[2], np.full(64, 1 / 64)) < 1e-100


def pair(radius: int, extension: int, angle: int, dither: int) -> list[float]:
    """Return the two values of a pair's words."""
    parts = [(radius, 4), (angle, 4), (extension, 2), (dither, 2), (dither, 2)]
    data = b"".join(value.to_bytes(size, "little") for value, size in parts)
    into = np.empty((1, 2))
    simulated.simulated_integers(np.frombuffer(data, np.uint8)[None], into)
    return into[0].tolist()


def test_the_simulated_sampler_reaches_eight_deviations_and_is_finite() -> None:
    first, second = pair(0, 0, 0, 0)
    assert 8.2 * DEVIATION < first < 8.3 * DEVIATION
    assert second == 0
    assert pair(2**32 - 1, 2**16 - 1, 0, 0)[0] == 0
    assert pair(0, 0, 2**31, 0)[0] == -first
    assert [pair(0, 0, 0, dither)[0] - first for dither in (1, 2**15 - 1, 2**15, 2**16 - 1)] == [
        1,
        2**15 - 1,
        -(2**15),
        -1,
    ]


@pytest.mark.parametrize("around", [0.3, 1.7, 3.1, 6.9, 7.9])
def test_the_simulated_sampler_fills_the_grid(around: float) -> None:
    """Normals that the pairs reach lie closer than the dither is wide: no integer is left out."""
    exponent = around**2 / 2 / np.log(2)
    numerator = int(2 ** (48 - exponent) * 0.9)  # the radius is a little beyond `around`
    radius, extension = divmod(numerator, 2**16)
    reach = np.sqrt(-2 * np.log((numerator + 0.5) * 2.0**-48))
    turn = np.arccos(around / reach) / (2 * np.pi) * 2**32
    words = np.empty((1, simulated.BYTES * 2000), np.uint8)
    words[:, :4000].view("<u4")[:] = radius
    words[:, 4000:8000].view("<u4")[:] = (turn + np.arange(-500, 500) * 1000).astype(np.uint32)
    words[:, 8000:10000].view("<u2")[:] = extension
    words[:, 10000:] = 0
    into = np.empty((1, 2000))
    simulated.simulated_integers(words, into)
    reached = np.unique(into[0, :1000])
    assert reached.min() < around * DEVIATION < reached.max()
    assert np.diff(reached).max() < 2**16


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (3, 7), (5, 64), (2, 1001)])
@pytest.mark.parametrize("block", [1, 3, 64, 600])
def test_blocks_and_rows_change_nothing(
    shape: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cols = shape
    words = np.random.default_rng(1).integers(
        0, 256, (rows, simulated.BYTES * (cols + cols % 2)), np.uint8
    )
    before, expected = words.copy(), np.full(shape, np.nan)
    simulated.simulated_integers(words, expected)
    monkeypatch.setattr(simulated, "_BLOCK_PAIRS", block)
    found = np.zeros((rows + 2, cols + 2))
    simulated.simulated_integers(words, found[1:-1, 1:-1])
    assert np.array_equal(found[1:-1, 1:-1], expected)
    found[1:-1, 1:-1] = 0
    assert (found == 0).all()
    for row in range(rows):
        alone = np.empty((1, cols))
        simulated.simulated_integers(words[[row]], alone)
        assert np.array_equal(alone[0], expected[row])
    assert np.array_equal(words, before)


def test_big_endian_words_give_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(2).integers(0, 256, (2, simulated.BYTES * 100), np.uint8)
    expected, found = np.empty((2, 100)), np.empty((2, 100))
    simulated.simulated_integers(words, expected)
    swapped = words.copy()
    swapped[:, :400] = words[:, :400].view("<u4").byteswap().view(np.uint8)
    swapped[:, 400:] = words[:, 400:].view("<u2").byteswap().view(np.uint8)
    for name in ("_WORD", "_SIGNED", "_HALF", "_DITHER"):
        monkeypatch.setattr(simulated, name, getattr(simulated, name).newbyteorder(">"))
    simulated.simulated_integers(swapped, found)
    assert np.array_equal(found, expected)


def test_odd_rows_start_as_even_ones() -> None:
    """An odd row takes the bytes of one value more, and leaves out the last value."""
    words = np.random.default_rng(3).integers(0, 256, (1, simulated.BYTES * 10), np.uint8)
    even, odd = np.empty((1, 10)), np.empty((1, 9))
    simulated.simulated_integers(words, even)
    simulated.simulated_integers(words, odd)
    assert np.array_equal(odd, even[:, :9])

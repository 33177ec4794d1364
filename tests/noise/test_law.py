"""The law of the spline sampler against that of rint(N(0, 2⁴⁸)): the constants of the proof.

Probabilities are computed from the table's whole numbers and with 90 digits: nothing is drawn.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from fedsim.noise.spline import CentreTable, centre_table

WIDTH, DEVIATION = 2**16, 2**24
END = 4093 * WIDTH  # of the range where the ratio of the laws is bounded
Chance = Callable[[int], Any]  # numbers of mpmath


@pytest.fixture(autouse=True)
def _precision() -> object:
    with mpmath.workdps(90):
        yield


@pytest.fixture(name="weights", scope="module")
def _weights() -> list[int]:
    """Units of 2^-224, from the packed words."""
    table: CentreTable = centre_table()
    found = [0] * 8192
    for column, (word, extension) in enumerate(zip(table.packed, table.extensions, strict=True)):
        other, low = divmod(int(word), 1 << 19)
        found[column] += (low << 192) + extension
        found[other] += 2**211 - (low << 192) - extension
    return found


def choose_three(n: int) -> int:
    return n * (n - 1) * (n - 2) // 6 if n >= 3 else 0


def four_uniforms(total: int, widths: tuple[int, ...]) -> int:
    """Return in how many ways four numbers, number i of 0 ... widths[i] - 1, have this total."""
    ways = 0
    for kept in itertools.product((0, 1), repeat=4):
        beyond = sum(one * width for one, width in zip(kept, widths, strict=True))
        ways += (-1) ** sum(kept) * choose_three(total - beyond + 3)
    return ways


def spline_chance(weights: list[int], bias: int = 0, lane: int = WIDTH) -> Chance:
    """Return the probability function of the sampler.

    Args:
        weights: of the columns.
        bias: added to every value.
        lane: one of the uniforms is below it, in place of 2¹⁶.
    """
    widths = (WIDTH, WIDTH, WIDTH, lane)

    def chance(k: int) -> Any:
        total = k - bias + 2 * (WIDTH - 1) + 4096 * WIDTH
        columns = range(max(0, total // WIDTH - 4), min(8191, total // WIDTH) + 1)
        parts = sum(weights[at] * four_uniforms(total - at * WIDTH, widths) for at in columns)
        return mpmath.mpf(parts) / math.prod(widths) / 2**224

    return chance


def normal_chance(k: int) -> Any:
    upper, lower = ((abs(k) + sign * mpmath.mpf(1) / 2) / DEVIATION for sign in (1, -1))
    root = mpmath.sqrt(2)
    return (mpmath.erfc(lower / root) - mpmath.erfc(upper / root)) / 2


def excess(chance: Chance, k: int) -> float:
    """Return the ratio of the sampler's law to the rounded normal's, minus 1."""
    return float(chance(k) / normal_chance(k) - 1)


def he4(x: float) -> float:
    return x**4 - 6 * x**2 + 3


def he5(x: float) -> float:
    return x**5 - 10 * x**3 + 15 * x


def bound(k: int) -> float:
    """Return the largest |excess| of the proof: its fourth term, and what follows it."""
    x = k / DEVIATION
    fifth = 2**-40 * (abs(he5(x)) + 1) / 180
    return 2**-32 * abs(he4(x)) / 384 + fifth


def places() -> list[int]:
    """Return 150 integers: all sizes, all places between two multiples of 2¹⁶, and the ends."""
    generator = np.random.default_rng(5)
    inside = generator.uniform(-15.9, 15.9, 100) * DEVIATION
    near = generator.uniform(-4, 4, 40) * DEVIATION
    found = [int(one) for one in [*inside, *near]]
    middles = [c * WIDTH + WIDTH // 2 for c in (0, 100, -300, 900, 4000)]
    return [*found, *middles, 0, WIDTH, -7 * WIDTH, END, -END]


def test_the_ratio_of_the_laws(weights: list[int]) -> None:
    """Within 1.05 of the bound, also of the coarser one |He₄| / 360 where He₄ is not near 0."""
    chance = spline_chance(weights)
    for k in places():
        x, found = k / DEVIATION, abs(excess(chance, k))
        assert found <= 1.05 * bound(k), x
        if abs(he4(x)) > 1:
            assert found <= 1.05 * 2**-32 * abs(he4(x)) / 360, x


def test_the_ratio_is_the_first_term_of_its_expansion(weights: list[int]) -> None:
    """1 + r with r = -2⁻³² He₄(x) t² (1 - t)² / 24, t the place between multiples of 2¹⁶."""
    chance = spline_chance(weights)
    for k in places():
        x, t = k / DEVIATION, k % WIDTH / WIDTH
        leading = -(2**-32) * he4(x) * (t * (1 - t)) ** 2 / 24
        assert abs(excess(chance, k) - leading) <= 2**-40 * (abs(he5(x)) + 1) / 180 + 1e-16, x


def test_the_mean_square_and_the_maximum(weights: list[int]) -> None:
    """E r² by quadrature in x and t is 24 · 2⁻⁶⁴ / (576 · 630); the proof uses 1e-23 and 5e-8."""
    chance = spline_chance(weights)
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(20)
    parts, part_weights = np.polynomial.legendre.leggauss(6)
    square = sum(
        weight
        / math.sqrt(2 * math.pi)
        * sum(
            one / 2 * excess(chance, int((int(x * 256) + (t + 1) / 2) * WIDTH)) ** 2
            for t, one in zip(parts, part_weights, strict=True)
        )
        for x, weight in zip(nodes, node_weights, strict=True)
        if abs(x) < 15
    )
    assert square == pytest.approx(24 * 2.0**-64 / (576 * 630), rel=0.02)
    assert square < 1e-23
    largest = max(abs(excess(chance, END - at * WIDTH // 16)) for at in range(64))
    assert 3e-8 < largest < 5e-8


def test_what_lies_outside(weights: list[int]) -> None:
    """Under either law below 2⁻¹⁸⁷, the table's rounding included."""
    normal = mpmath.erfc((END + mpmath.mpf(1) / 2) / DEVIATION / mpmath.sqrt(2))
    # |Z - 2¹⁶ c| < 2¹⁷, so outside of the range |c| is at least 4092.
    drawn = sum(weights[4096 + sign * c] for c in range(4092, 4096) for sign in (-1, 1))
    assert normal * (1 + 1e-4) < mpmath.mpf(2) ** -187
    assert mpmath.mpf(drawn) / 2**224 + mpmath.mpf(2) ** -210 < mpmath.mpf(2) ** -187


def test_the_constants_of_the_proof() -> None:
    """The sums over n >= 5 that docs/explain/proofs.md bounds, computed."""
    variance = mpmath.mpf(2) ** 48 - mpmath.mpf(2) ** 32 / 3 + mpmath.mpf(5) / 12
    ratio = float(WIDTH / mpmath.sqrt(variance))
    fourth = ratio**4 * math.sqrt(24) / 384
    rest = sum((2 * ratio) ** n / math.sqrt(math.factorial(n)) / 48 for n in range(5, 60))
    even = sum(
        (ratio**2 / 3) ** m * double_factorial(2 * m - 1) / math.sqrt(math.factorial(2 * m))
        for m in range(3, 30)
    )
    assert (fourth + rest + even) ** 2 / (1 - 2**-16) < 9.3e-24
    far = 16.0
    largest = ratio**4 * he4(far) / 384 + ratio**5 * he5(far) / 180
    largest += sum(
        ((2 * ratio) ** n / 48 + moment(n) * ratio**n) * he_bound(n, far) / math.factorial(n)
        for n in range(6, 60)
    )
    assert largest / (1 - 2**-16) < 4.6e-8


def test_the_factors_that_the_proof_bounds(weights: list[int]) -> None:
    """κ, the difference of the fourth moments, and P(k) / G(k)."""
    centre = mpmath.mpf(2) ** 16 - mpmath.mpf(1) / 3 + mpmath.mpf(5) / 12 / 2**32
    variance = centre * WIDTH**2
    # The weight of 0 is 1 over the sum of exp(-c² / 2v), and its whole numbers are 2^-224.
    kappa = mpmath.mpf(weights[4096]) / 2**224 * mpmath.sqrt(2 * mpmath.pi * centre)
    assert abs(kappa - 1) < mpmath.mpf(2) ** -187
    for between in (0, WIDTH - 1, WIDTH**2 // 8, WIDTH**2 // 4):
        fourth = mpmath.mpf(WIDTH**2 * (WIDTH**2 - 1)) / 3 - between**2 - 2 * between
        normal = (mpmath.mpf(WIDTH**2) - 1) ** 2 / 3 - mpmath.mpf(1) / 120
        assert abs(fourth - normal) <= mpmath.mpf(WIDTH) ** 4 / 16 * (1 + 1e-9)
    for k in places():
        density = mpmath.exp(-k * k / (2 * variance)) / mpmath.sqrt(2 * mpmath.pi * variance)
        assert normal_chance(k) / density > 1 - 2**-16


def double_factorial(n: int) -> int:
    return math.prod(range(n, 0, -2))


def moment(n: int) -> float:
    """Return E|Y|^n in units of 2¹⁶, at most that of a normal of variance 1/3; 0 where n is odd."""
    return 0.0 if n % 2 else double_factorial(n - 1) / 3 ** (n // 2)


def he_bound(n: int, x: float) -> float:
    """Return E (x + |N|)^n >= |He_n(x)|."""

    def absolute(j: int) -> float:
        return 2 ** (j / 2) * math.gamma((j + 1) / 2) / math.sqrt(math.pi)

    return sum(math.comb(n, j) * x ** (n - j) * absolute(j) for j in range(n + 1))


@pytest.mark.parametrize("width", [4, 6, 16])
def test_the_moments_of_four_uniforms_on_every_residue(width: int) -> None:
    """By enumeration: moments 0 to 3 do not depend on the residue, the fourth as the proof says."""
    ways = [four_uniforms(total, (width,) * 4) for total in range(4 * width - 3)]
    for k in range(width):
        moments = [
            sum(
                ways[total] * (total - 2 * (width - 1)) ** n
                for total in range(4 * width - 3)
                if (total - 2 * (width - 1) - k) % width == 0
            )
            for n in range(5)
        ]
        per = width**3  # width · B is the weight of a place
        assert moments[:4] == [per, 0, per * (width**2 - 1) // 3, 0]
        between = k * (width - k)
        fourth = width**2 * (width**2 - 1) - 3 * between**2 - 6 * between
        assert 3 * moments[4] == per * fourth


def rejects(chance: Chance) -> bool:
    return any(abs(excess(chance, k)) > 1.05 * bound(k) for k in places()[:12])


def test_slightly_wrong_laws_are_rejected(weights: list[int]) -> None:
    assert not rejects(spline_chance(weights))
    assert rejects(spline_chance(weights, bias=1))
    assert rejects(spline_chance(weights, lane=2**15))
    other = list(weights)
    for c in range(-4095, 4096):  # a variance larger by 1e-9 of itself
        relative = 1e-9 * ((c / 256) ** 2 - 1) / 2
        other[4096 + c] += int(mpmath.mpf(weights[4096 + c]) * relative)
    assert rejects(spline_chance(other))

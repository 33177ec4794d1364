"""The law of a sum of h draws against that of one rounded normal: docs/explain/trust_models.md.

The law comes from its characteristic function, with 110 digits: nothing is drawn.
"""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest

from fedsim.accountant import sampler_slack
from fedsim.noise.spline import CENTRE_VARIANCE, MAX_CENTRE

WIDTH, DEVIATION = 2**16, 2**24
END = 16.25  # deviations, of the range where the ratio of the laws is bounded
MOST_CLIENTS = 2**22
CLIENTS = (2, 3, 10, 100)


@pytest.fixture(autouse=True)
def _precision() -> object:
    with mpmath.workdps(110):
        yield


def he4(x: float) -> float:
    return x**4 - 6 * x**2 + 3


def he6(x: float) -> float:
    return x**6 - 15 * x**4 + 45 * x**2 - 15


class SumLaw:
    """Probabilities of the sum of `honest` draws whose centres are not cut off.

    The characteristic function of a draw is that of its centre, a Gaussian around each multiple of
    2π / 2¹⁶, times the fourth power of that of a uniform. The inversion integral is a sum over
    nodes so narrow that its period is 44 deviations. Only the part around 0 matters for two draws
    and more: uniforms have zeros of order 8 and more at the others.
    """

    def __init__(self, honest: int, *, stretch: float = 1.0, uniforms: int = 4) -> None:
        numerator, denominator = CENTRE_VARIANCE
        variance = mpmath.mpf(numerator) / denominator * stretch
        period = 44 * mpmath.sqrt(honest) * DEVIATION
        self.angles = [2 * mpmath.pi * i / period for i in range(310)]
        shares = [mpmath.mpf(i > 0) + 1 for i in range(310)]  # both signs
        self.weights = [
            share / period * self._draw(angle, variance, uniforms) ** honest
            for share, angle in zip(shares, self.angles, strict=True)
        ]

    @staticmethod
    def _draw(angle: Any, variance: Any, uniforms: int) -> Any:
        half = WIDTH * angle / 2
        uniform = mpmath.sin(half) / (WIDTH * mpmath.sin(angle / 2)) if angle else mpmath.mpf(1)
        return mpmath.exp(-2 * variance * half**2) * uniform**uniforms

    def chance(self, k: int) -> Any:
        turn = mpmath.cos(k * self.angles[1])
        last, this, total = mpmath.mpf(1), turn, self.weights[0] + self.weights[1] * turn
        for weight in self.weights[2:]:  # cos((i + 1) a) = 2 cos a cos(i a) - cos((i - 1) a)
            last, this = this, 2 * turn * this - last
            total += weight * this
        return total


def rounded_normal(k: int, variance: Any) -> Any:
    upper, lower = ((abs(k) + sign * mpmath.mpf(1) / 2) for sign in (1, -1))
    root = mpmath.sqrt(2 * variance)
    return (mpmath.erfc(lower / root) - mpmath.erfc(upper / root)) / 2


def of_sum(honest: int) -> Any:
    """The variance of N in the law that a sum of `honest` draws is compared with."""
    return honest * mpmath.mpf(DEVIATION) ** 2 + mpmath.mpf(honest - 1) / 12


def excess(law: SumLaw, honest: int, k: int) -> float:
    return float(law.chance(k) / rounded_normal(k, of_sum(honest)) - 1)


def places(honest: int) -> list[int]:
    """Return integers of all sizes, to the end of the range, at all places between centres."""
    unit = math.sqrt(honest) * DEVIATION
    found = [int(x * unit) + shift for x, shift in zip(XS, itertools.count(1, 7919), strict=False)]
    return [*found, 0, WIDTH, -3 * WIDTH // 2]


XS = (0.1, 0.4, 1.0, -1.6, 2.9, -4.2, 6.0, 9.0, -12.0, 14.5, -16.2)


@pytest.mark.parametrize("honest", CLIENTS)
def test_the_ratio_of_the_laws_is_its_leading_term(honest: int) -> None:
    """1 + r with r = -2⁻³² He₄(x) / (720 h), and less than 1e-8 · |He₆| of it besides."""
    law, unit = SumLaw(honest), math.sqrt(honest) * DEVIATION
    for k in places(honest):
        x = k / unit
        leading = -(2.0**-32) * he4(x) / (720 * honest)
        found = excess(law, honest, k)
        rest = 1.05 * 2.0**-48 * (abs(he6(x)) + 15) / (4320 * honest)
        assert abs(found - leading) <= rest + leading**2, x
        assert abs(found) <= 1.01 * 2.0**-32 * (abs(he4(x)) + 0.01) / (720 * honest)


def test_slightly_wrong_laws_are_rejected() -> None:
    """A variance off by 1e-9 of itself, or three uniforms in place of four."""

    def rejects(law: SumLaw) -> bool:
        unit = math.sqrt(2) * DEVIATION
        return any(
            abs(excess(law, 2, k)) > 1.01 * 2.0**-32 * (abs(he4(k / unit)) + 0.01) / 1440
            for k in places(2)[:6]
        )

    assert not rejects(SumLaw(2))
    assert rejects(SumLaw(2, stretch=1 + 1e-9))
    assert rejects(SumLaw(2, stretch=1 - 1e-9))
    assert rejects(SumLaw(2, uniforms=3))


@pytest.mark.parametrize("width", [4, 6])
def test_the_first_eight_moments_do_not_depend_on_the_place(width: int) -> None:
    """By enumeration, of eight uniforms on every residue; the fourth cumulant is known."""
    ways = np.array([1], dtype=object)
    for _ in range(8):
        ways = np.convolve(ways, np.ones(width, dtype=object))
    centre = 4 * (width - 1)
    for power in range(8):
        found = {
            sum(
                ways[total] * (total - centre) ** power
                for total in range(len(ways))
                if (total - k) % width == 0
            )
            for k in range(width)
        }
        assert len(found) == 1
    moments = [
        sum(ways[total] * (total - centre) ** power for total in range(len(ways))) / width**8
        for power in (2, 4, 6)
    ]
    second, fourth, sixth = moments
    assert second == pytest.approx(2 * (width**2 - 1) / 3)
    assert fourth - 3 * second**2 == pytest.approx(-2 * (width**4 - 1) / 30)
    assert abs(sixth - 15 * second**3) <= 4 * width**6 / 6


def double_factorial(n: int) -> float:
    return float(math.prod(range(n, 0, -2)))


def he_bound(n: int, x: float) -> float:
    """Return E (x + |N|)^n >= |He_n(x)|."""

    def absolute(j: int) -> float:
        return 2 ** (j / 2) * math.gamma((j + 1) / 2) / math.sqrt(math.pi)

    return sum(math.comb(n, j) * x ** (n - j) * absolute(j) for j in range(n + 1))


def remainders(honest: int) -> dict[int, float]:
    """Bounds of |m_n - E Y^n| / (hV)^(n/2) for n = 8 ... 39."""
    variance = CENTRE_VARIANCE[0] / CENTRE_VARIANCE[1]  # in squares of 2¹⁶
    half = 0.5 / math.sqrt(honest * variance)
    spread = math.sqrt(1 / (3 * variance))
    sizes = np.linspace(0.0, 12.0, 12_001)  # beyond, s^39 e^(-s²/2) falls
    even = {
        n: 2 * double_factorial(n - 1) * spread**n
        + 2.01 * float(np.max((half + sizes * spread) ** n * np.exp(-np.square(sizes) / 2)))
        for n in range(8, 41, 2)
    }
    odd = {n: math.sqrt(even[n - 1] * even[n + 1]) for n in range(9, 40, 2)}
    return {n: bound for n, bound in {**even, **odd}.items() if n < 40}


@pytest.mark.parametrize("honest", [2, 3, 100, MOST_CLIENTS])
def test_the_constants_of_the_proof(honest: int) -> None:
    """E r² and the largest |r|, from the bounds of all terms; what follows n = 39 is nothing."""
    ratio = float(WIDTH / mpmath.sqrt(mpmath.mpf(DEVIATION) ** 2))
    fourth, sixth = ratio**4 / (720 * honest), ratio**6 / (4320 * honest)
    rest = remainders(honest)
    norm = fourth * math.sqrt(24) + sixth * math.sqrt(720)
    norm += sum(bound / math.sqrt(math.factorial(n)) for n, bound in rest.items())
    assert norm**2 / (1 - 2**-16) * (1 + 1e-4) < 7e-25 < sampler_slack._MEAN_SQUARE
    largest = fourth * he4(END) + sixth * he6(END)
    largest += sum(bound * he_bound(n, END) / math.factorial(n) for n, bound in rest.items())
    cut_off = (
        2 * honest * normal_tail((MAX_CENTRE + 0.5) / 256 - END / math.sqrt(honest), 1 - 1 / honest)
    )
    assert cut_off < 5e-10
    assert largest / (1 - 2**-16) * (1 + 1e-4) < 1.2e-8
    assert largest + cut_off < sampler_slack._MAX_LOG_RATIO


def normal_tail(distance: float, variance: float) -> float:
    return float(mpmath.erfc(distance / mpmath.sqrt(2 * variance)) / 2)


def test_what_lies_outside() -> None:
    """Chernoff's bound for the sampler, the law itself for rounded normals, and the table."""
    drawn = 2 * mpmath.exp(-(mpmath.mpf(END) ** 2) / 2 * (1 - mpmath.mpf(2) ** -46))
    assert drawn < mpmath.mpf(2) ** -189
    assert mpmath.erfc(END / mpmath.sqrt(2)) < drawn
    table = MOST_CLIENTS * mpmath.mpf(2) ** -210
    assert float(drawn + table) < sampler_slack._OUTSIDE


@pytest.mark.parametrize("honest", [2, 10, 1000])
def test_a_sum_of_rounded_normals_is_one_with_a_little_more_noise(honest: int) -> None:
    """By its characteristic function exp(-hs²a²/2) (sin(a/2) / (a/2))^h, for a deviation s of 8.

    With 2²⁴ in place of 8 the difference of the laws, (h - 1) |He₄| / (2880 h² s⁴), is below 1e-28.
    """
    deviation = 8
    period = 2 * math.ceil(12 * math.sqrt(honest) * deviation)
    unit = mpmath.sqrt(honest) * deviation
    variance = honest * mpmath.mpf(deviation) ** 2 + mpmath.mpf(honest - 1) / 12
    with mpmath.workdps(40):
        angles = [2 * mpmath.pi * i / period for i in range(1, period // 2)]
        logs = [
            mpmath.exp(-honest * deviation**2 * a**2 / 2) * (mpmath.sin(a / 2) / (a / 2)) ** honest
            for a in angles
            if a * unit < 16
        ]
        for x in (0.0, 1.0, -2.5, 4.0):
            k = int(x * unit)
            total = 1 + 2 * sum(w * mpmath.cos(k * a) for w, a in zip(logs, angles, strict=False))
            found = float(total / period / rounded_normal(k, variance) - 1)
            at = float(k / mpmath.sqrt(variance))
            leading = -(honest - 1) * he4(at) / (2880 * honest**2 * deviation**4)
            assert found == pytest.approx(leading, rel=0.02, abs=1e-3 / deviation**6 / honest)
    assert he4(END) / (2880 * 4 * float(DEVIATION) ** 4) < 1e-28

"""The number of runs has the stated distribution: probabilities, mean, and drawn numbers."""

import math
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import islice

import pytest
from scipy.stats import chi2, nbinom, poisson

from fedsim.accountant.rdp.selection import (
    DRAW_BITS,
    TAIL,
    RunCountDistribution,
    distribution_text,
    log_inverse_gamma,
)

LAWS = [(5.0, 1.0), (5.0, 0.0), (5.0, 0.5), (3.0, 1e3), (5.0, None), (1.0, 0.3), (1.0, None)]


def probabilities(distribution: RunCountDistribution, count: int) -> list[float]:
    with localcontext(prec=100):
        return [float(value) for value in islice(distribution.probabilities(), count)]


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_probabilities_are_those_of_scipy(mean: float, shape: float | None) -> None:
    found = probabilities(RunCountDistribution(mean, shape), 60)
    if shape is None:
        expected = [float(poisson.pmf(k, mean)) for k in range(60)]
    elif mean == 1.0:
        expected = [0.0, 1.0] + [0.0] * 58
    elif shape == 0.0:
        gamma = math.exp(-log_inverse_gamma(mean, shape))
        expected = [0.0] + [(1 - gamma) ** k / (k * -math.log(gamma)) for k in range(1, 60)]
    else:
        gamma = math.exp(-log_inverse_gamma(mean, shape))
        none = float(nbinom.pmf(0, shape, gamma))
        weights = [float(nbinom.pmf(k, shape, gamma)) / (1 - none) for k in range(1, 60)]
        expected = [0.0, *weights]
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-30)


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_the_mean_is_at_most_the_stated_one_and_the_tail_is_as_stated(
    mean: float, shape: float | None
) -> None:
    distribution = RunCountDistribution(mean, shape)
    with localcontext(prec=100):
        total = expected = Decimal(0)
        for runs, probability in zip(
            range(distribution.most_runs + 1), distribution.probabilities(), strict=False
        ):
            total += probability
            expected += runs * probability
        assert 0 <= 1 - total <= Decimal(TAIL)
        assert -1e-9 * mean <= float(expected - Decimal(mean)) <= 0.0


def fixed(runs: int) -> Callable[[Callable[[int], int]], int]:
    return lambda bits: runs


def misfit(
    distribution: RunCountDistribution,
    draw: Callable[[Callable[[int], int]], int],
    count: int = 1500,
) -> float:
    """Return the p value of a chi-square test of drawn numbers against the distribution."""
    source = random.Random(7)
    drawn = Counter(draw(source.getrandbits) for _ in range(count))
    weights = probabilities(distribution, 200)
    statistic, cells, rest, others = 0.0, 0, 1.0, count
    for runs, weight in enumerate(weights):
        if weight * count >= 10:
            statistic += (drawn[runs] - weight * count) ** 2 / (weight * count)
            cells, rest, others = cells + 1, rest - weight, others - drawn[runs]
    statistic += (others - rest * count) ** 2 / (rest * count)
    return float(chi2.sf(statistic, cells))


@pytest.mark.parametrize(
    "shape", [1.0, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (0.0, 2.0, None))]
)
def test_what_is_drawn_has_the_law_and_a_wrong_law_is_seen(shape: float | None) -> None:
    # The source is seeded, so there are no false alarms; a fresh one would have one in 1,000.
    distribution = RunCountDistribution(3.0, shape)
    assert misfit(distribution, distribution.draw) > 1e-3
    assert misfit(distribution, fixed(3)) < 1e-12
    assert misfit(distribution, RunCountDistribution(3.6, shape).draw) < 1e-3
    other = RunCountDistribution(3.0, 1.0 if shape is None else None)
    assert misfit(distribution, other.draw) < 1e-12


def test_a_draw_is_the_quantile_of_256_random_bits() -> None:
    asked: list[int] = []

    def bits(number: int) -> int:
        asked.append(number)
        return 2 ** (number - 1)  # the median

    assert RunCountDistribution(4.0, 1.0).draw(bits) == 3  # 1/4 + 3/16 + 9/64 > 1/2
    assert asked == [DRAW_BITS]
    assert RunCountDistribution(4.0, 1.0).draw(lambda number: 0) == 1
    assert RunCountDistribution(4.0, None).draw(lambda number: 0) == 0
    assert RunCountDistribution(4.0, 1.0).draw(lambda number: 2**number - 1) > 200


def test_laws_have_names_and_bad_ones_are_refused() -> None:
    assert distribution_text(5.0, 1.0) == "the geometric distribution with mean 5"
    assert distribution_text(5.0, None) == "the Poisson distribution with mean 5"
    assert (
        distribution_text(5.0, 0.5)
        == "the truncated negative binomial distribution with mean 5 and shape 0.5"
    )
    with pytest.raises(ValueError, match="mean must be finite and >= 1"):
        RunCountDistribution(0.5, 1.0)
    with pytest.raises(ValueError, match="shape must be finite and >= 0"):
        RunCountDistribution(2.0, -1.0)

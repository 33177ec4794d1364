"""The numbers of a comparison: scipy agrees, and the promised error rates hold."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsim.comparison.statistics import (
    MAX_FLIPPED_PAIRS,
    holm,
    paired_difference,
    sign_flip_test,
    t_interval,
)


def recorded(variant: str) -> list[float]:
    """Test accuracies by seed, from a comparison.csv of experiments/compare_digits.yaml."""
    with (Path(__file__).parent / "compare_digits.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == variant]
    return [float(row["test_accuracy"]) for row in rows]


PLAIN, PRIVATE = recorded("non-private"), recorded("eps-8")


def test_the_interval_of_a_mean_is_scipys() -> None:
    found = t_interval(PLAIN)
    expected = stats.ttest_1samp(PLAIN, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(PLAIN), rel=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-12)


def test_the_paired_difference_and_its_test_are_scipys() -> None:
    found = paired_difference(PRIVATE, PLAIN)
    expected = stats.ttest_rel(PRIVATE, PLAIN)
    interval = expected.confidence_interval(0.95)
    assert found.t_p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.estimate.low, found.estimate.high) == pytest.approx(tuple(interval), rel=1e-9)


def test_the_sign_flip_test_is_scipys_exact_permutation_test() -> None:
    generator = np.random.default_rng(3)
    for n in (2, 3, 5, 9):
        differences = generator.normal(0.4, 1.0, n)
        expected = stats.permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=10_000
        )
        assert sign_flip_test(differences) == pytest.approx(expected.pvalue, abs=1e-12)


def test_five_seeds_cannot_be_significant_by_sign_flips() -> None:
    found = paired_difference(PRIVATE[:5], PLAIN[:5])
    assert found.sign_flip_p == found.sign_flip_floor == 2 / 2**5


def test_one_seed_has_a_value_and_nothing_else() -> None:
    found = paired_difference([0.5], [0.75])
    assert found.estimate.mean == -0.25
    assert (found.estimate.sd, found.estimate.low, found.estimate.high) == (None, None, None)
    assert (found.t_p, found.sign_flip_p) == (None, None)


def test_equal_variants_differ_by_nothing_and_equal_differences_are_not_tested() -> None:
    same = paired_difference([0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    assert (same.estimate.mean, same.t_p, same.sign_flip_p) == (0.0, 1.0, 1.0)
    assert paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).t_p is None


def test_more_seeds_than_can_be_enumerated_leave_the_t_test() -> None:
    generator = np.random.default_rng(5)
    found = paired_difference(
        generator.normal(size=MAX_FLIPPED_PAIRS + 1).tolist(), [0.0] * (MAX_FLIPPED_PAIRS + 1)
    )
    assert found.sign_flip_p is None
    assert found.t_p is not None


def coverage(shift: float, repetitions: int = 2000, seeds: int = 5) -> float:
    """The share of simulated comparisons of 5 seeds whose interval covers zero."""
    generator = np.random.default_rng(11)
    seed_effects = generator.normal(0.9, 0.05, (repetitions, seeds))  # shared by a pair
    covered = 0
    for effects in seed_effects:
        values = effects + shift + generator.normal(0, 0.01, seeds)
        found = paired_difference(values, effects + generator.normal(0, 0.01, seeds)).estimate
        covered += found.low is not None and found.high is not None and found.low <= 0 <= found.high
    return covered / repetitions


def test_a_planted_zero_difference_is_covered_in_95_of_100_comparisons() -> None:
    # The number covered is Binomial(2000, 0.95): within 0.95 +- 0.0216 with probability 1 - 1e-5,
    # the false alarm rate. A true shift of half a standard deviation of a difference must be seen.
    slack = 4.42 * np.sqrt(0.95 * 0.05 / 2000)
    assert abs(coverage(0.0) - 0.95) < slack
    assert abs(coverage(0.007) - 0.95) > slack


def test_sign_flips_keep_their_level_for_differences_that_are_not_normal() -> None:
    # Symmetric but heavy-tailed. P(p <= 0.1) <= 0.1: with 7 seeds the attainable level is
    # 12/128 = 0.09375; 4000 repetitions stray by 0.021 with probability 1e-5.
    generator = np.random.default_rng(13)
    found = [sign_flip_test(generator.standard_cauchy(7)) for _ in range(4000)]
    rate = np.mean([p is not None and p <= 0.1 for p in found])
    assert abs(rate - 12 / 128) < 0.021


def test_holm_adjusts_in_order_and_passes_over_what_was_not_tested() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx((0.03, None, 0.06, 0.06))
    assert holm([0.5, 0.9]) == pytest.approx((1.0, 1.0))
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_p_value_and_bonferroni(p_values: list[float]) -> None:
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        assert adjusted is not None
        assert p <= adjusted <= 1
        assert adjusted >= min(1.0, min(p_values) * len(p_values)) or p == 1

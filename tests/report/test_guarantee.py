"""Numbers of the guarantee: never rounded to the side that flatters."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fedsim.report.client_table import aligned_epsilon
from fedsim.report.figures import epsilon_text
from fedsim.report.guarantee import interpretation, true_positive_bound
from fedsim.report.overview import duration_text

epsilons = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@given(epsilons)
def test_printed_epsilon_is_never_below_the_true_one(epsilon):
    for text in (epsilon_text(epsilon), aligned_epsilon(epsilon)):
        assert float(text) >= epsilon


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_printed_epsilon_is_close_to_the_true_one(epsilon):
    assert float(aligned_epsilon(epsilon)) <= epsilon * 1.0011


@given(epsilons)
def test_alignment_changes_no_number(epsilon):
    assert float(aligned_epsilon(epsilon)) == float(epsilon_text(epsilon))


def test_aligned_epsilon_shows_four_digits():
    shown = {8.0: "8.000", 0.5: "0.5000", 10.0: "10.00", 100.0: "100.0", 12345.0: "12350", 0: "0"}
    assert {epsilon: aligned_epsilon(epsilon) for epsilon in shown} == shown
    assert aligned_epsilon(None) == "∞"


@given(st.floats(0, 1e6), st.floats(0, 0.1), st.floats(1e-4, 0.5))
def test_true_positive_bound_is_the_definition(epsilon, delta, rate):
    bound = true_positive_bound(epsilon, delta, rate)
    exact = 1.0 if epsilon > 700 else min(1.0, math.exp(epsilon) * rate + delta)
    assert math.isclose(bound, exact, rel_tol=1e-12)


def test_interpretation_rounds_the_attackers_success_up():
    # e^1 * 0.01 + 1e-5 = 0.0271928
    assert "at most 2.8% of the examples" in interpretation(1.0, 1e-5)


def test_interpretation_admits_when_the_bound_says_nothing():
    assert "not held back" in interpretation(8.0, 1e-3)
    assert "ε < 4.6" in interpretation(8.0, 1e-3)


def test_durations_have_the_units_that_matter():
    assert [duration_text(s) for s in (4.936, 59.99, 252, 7265)] == [
        "4.9 s",
        "60.0 s",
        "4 min 12 s",
        "2 h 1 min",
    ]

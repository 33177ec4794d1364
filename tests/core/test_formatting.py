"""Numbers as text: privacy figures are never rounded in a flattering direction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core.formatting import (
    aligned_epsilon,
    delta_text,
    dtype_text,
    duration_text,
    epsilon_text,
    least_epsilon_text,
    percent_text,
)

epsilons = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@given(epsilons)
def test_printed_epsilon_is_never_below_the_true_one(epsilon):
    for text in (epsilon_text(epsilon), aligned_epsilon(epsilon)):
        assert float(text) >= epsilon


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_a_printed_lower_bound_is_never_above_the_true_one(epsilon):
    assert epsilon * (1 - 1.0011e-3) <= float(least_epsilon_text(epsilon)) <= epsilon


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


@given(st.floats(min_value=1e-300, max_value=1, exclude_max=True))
def test_printed_delta_is_never_below_the_true_one_and_close_to_it(delta):
    assert delta <= float(delta_text(delta)) <= delta * 1.0011


@pytest.mark.parametrize(("delta", "text"), [(1e-3, "0.001"), (1e-5, "1e-05"), (0.0, "0")])
def test_a_delta_that_was_written_by_hand_stays_as_it_was(delta, text):
    assert delta_text(delta) == text


@given(st.floats(min_value=0, max_value=1))
def test_an_attackers_success_is_rounded_up(share):
    printed = float(percent_text(share).removesuffix("%"))
    assert share * 100 <= printed * (1 + 1e-12)
    assert printed <= min(100.0, share * 100 + 0.1 + 1e-9)


def test_durations_have_the_units_that_matter():
    assert [duration_text(s) for s in (0.0094, 0.0994, 0.0996, 4.936, 59.99, 252, 7265)] == [
        "9 ms",
        "99 ms",
        "0.1 s",
        "4.9 s",
        "60.0 s",
        "4 min 12 s",
        "2 h 1 min",
    ]


def test_the_name_of_a_dtype_is_that_of_the_files():
    assert [dtype_text(dtype) for dtype in (torch.float32, torch.bool)] == ["float32", "bool"]

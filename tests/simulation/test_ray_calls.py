"""How many requests go into one call to a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="the worker pool needs the extra `ray`")

from fedsim.simulation.ray_pool import _calls_size


def calls(waiting: int, good: int) -> list[int]:
    found = []
    while waiting:
        found.append(_calls_size(waiting, good))
        waiting -= found[-1]
    return found


@given(st.integers(1, 2000), st.integers(1, 256))
def test_all_are_asked_in_good_calls_and_the_last_is_short_without_crumbs(
    waiting: int, good: int
) -> None:
    sizes = calls(waiting, good)
    assert sum(sizes) == waiting
    assert max(sizes) <= good
    assert sizes[-1] <= max(1, good / 2)
    assert len(sizes) <= waiting / good + 4


def test_a_round_of_25_clients_of_which_22_make_a_good_call() -> None:
    assert calls(25, 22) == [13, 6, 6]
    assert calls(3, 1) == [1, 1, 1]

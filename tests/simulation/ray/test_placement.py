"""Placement: every client on exactly one worker, with its range, evenly."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.simulation.ray.engine import longest_first, place_ranges

works = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=7)


def busiest(work: list[float], shares: tuple[tuple[int, ...], ...]) -> float:
    return max(sum(work[client] for client in share) for share in shares)


@given(works, st.integers(1, 3))
def test_the_busiest_worker_is_near_the_best_possible(work: list[float], workers: int) -> None:
    """Graham's bound, compared with all possible placements."""
    best = min(
        max(sum(w for w, at in zip(work, places, strict=True) if at == m) for m in range(workers))
        for places in product(range(workers), repeat=len(work))
    )
    shares = longest_first(work, workers)
    assert busiest(work, shares) <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9


@given(works, st.integers(1, 9))
def test_every_client_has_one_worker_and_every_worker_a_client(
    work: list[float], workers: int
) -> None:
    shares = longest_first(work, workers)
    assert sorted(client for share in shares for client in share) == list(range(len(work)))
    assert all(share == tuple(sorted(share)) for share in shares)
    assert len(shares) == min(workers, len(work))
    if all(work):
        assert all(shares)


@given(works, st.integers(1, 9), st.data())
def test_a_range_is_on_one_worker(work: list[float], workers: int, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, len(work)))) | {len(work)})
    ranges = [range(start, end) for start, end in pairwise([0, *ends])]
    shares = place_ranges(ranges, work, workers)
    assert sorted(client for share in shares for client in share) == list(range(len(work)))
    for own in ranges:
        assert sum(set(own) <= set(share) for share in shares) == 1
    assert all(share == tuple(sorted(share)) for share in shares)
    assert len(shares) == min(workers, len(ranges))


def test_grahams_worst_case() -> None:
    """Two workers, 3 3 2 2 2: longest first needs 7 where 6 is possible, its bound exactly."""
    assert busiest([3, 3, 2, 2, 2], longest_first([3, 3, 2, 2, 2], 2)) == 7


def test_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        longest_first([1.0], 0)

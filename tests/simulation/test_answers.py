"""Chunks of answers: all answers, in order, none delayed by the computation of later ones."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from fedsim.simulation.engine import chunk_by_time


class Clock:
    """A clock that advances only during work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def working(self, groups: list[tuple[float, list[int]]]) -> Iterator[list[int]]:
        """Yield groups, each after its seconds of work."""
        for seconds, group in groups:
            self.now += seconds
            yield group


def test_a_chunk_ends_with_its_group_before_the_next_group_begins() -> None:
    clock = Clock()
    groups = clock.working([(0.3, [1, 2, 3]), (0.25, [4, 5]), (0.1, [6]), (0.1, [7])])
    sent = [
        (found, clock.now) for found, _ in chunk_by_time(groups, 7, chunk_seconds=0.2, clock=clock)
    ]
    assert sent == [([1, 2, 3], 0.3), ([4, 5], 0.55), ([6, 7], 0.75)]


def test_the_last_chunk_does_not_wait_for_its_time() -> None:
    clock = Clock()
    groups = clock.working([(0.1, [1]), (0.05, [2])])
    ((found, seconds),) = chunk_by_time(groups, 2, chunk_seconds=0.2, clock=clock)
    assert found == [1, 2]
    assert abs(seconds - 0.15) < 1e-9


work = st.lists(st.tuples(st.floats(0, 1), st.lists(st.integers(), max_size=4)), max_size=9)


@given(groups=work, every=st.floats(0.01, 2))
def test_every_answer_is_sent_once_and_in_order(
    groups: list[tuple[float, list[int]]], every: float
) -> None:
    clock, count = Clock(), sum(len(group) for _, group in groups)
    parts = [
        found
        for found, _ in chunk_by_time(
            clock.working(groups), count, chunk_seconds=every, clock=clock
        )
    ]
    assert [answer for found in parts for answer in found] == [a for _, own in groups for a in own]
    assert all(parts)

"""Parts of a round add up, and each moment counts once."""

from collections.abc import Iterator

import pytest

from fedsim.server.timeline import PARTS, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_inside_another_interrupts_it() -> None:
    clock = Clock()
    timeline = Timeline(clock)

    def replies() -> Iterator[int]:
        for number in range(3):
            clock.now += 10
            yield number
        clock.now += 5

    with timeline.part("sample"):
        clock.now += 1
    clock.now += 1000  # in no part
    with timeline.part("aggregate"):
        for number in timeline.waiting("train", replies()):
            clock.now += number
    assert timeline.seconds == {
        "sample": 1.0,
        "train": 35.0,
        "aggregate": 3.0,
        "evaluate": 0.0,
        "account": 0.0,
    }


def test_a_part_that_raises_counts_and_ends() -> None:
    clock = Clock()
    timeline = Timeline(clock)

    def failing() -> None:
        with timeline.part("evaluate"):
            clock.now += 2
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    clock.now += 7
    with timeline.part("account"):
        clock.now += 3
    assert sum(timeline.seconds.values()) == 5.0
    assert list(timeline.seconds) == list(PARTS)

"""Parts of a round add up, and each moment counts once."""

import pytest

from fedsim.server.app import Timeline
from fedsim.server.round_report import PARTS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_moment_counts_towards_the_part_that_began_last() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    clock.now += 1000  # before the first part
    for part, seconds in (("sample", 1), ("train", 10), ("aggregate", 2), ("train", 25)):
        timeline.begin(part)
        clock.now += seconds
    timeline.begin(None)
    clock.now += 1000  # in no part
    timeline.begin("account")
    clock.now += 3
    timeline.begin(None)
    assert list(timeline.seconds) == list(PARTS)
    assert timeline.seconds == {
        "sample": 1.0,
        "train": 35.0,
        "aggregate": 2.0,
        "evaluate": 0.0,
        "account": 3.0,
    }


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="lunch"):
        Timeline().begin("lunch")

"""Asynchronous rounds against a plain simulation that asks at every moment what the rules say."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fedsim.server.participation.buffered import BufferedSchedule


def test_with_equal_durations_updates_come_in_waves() -> None:
    schedule = BufferedSchedule(1, 100, concurrency=6, buffer_size=3, durations="constant")
    rounds = [schedule.round(number) for number in range(1, 9)]
    # Six begin at time 0. Each half of a wave fills the buffer, and three begin in its place.
    assert [one.time for one in rounds] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert [set(one.starts) for one in rounds[:2]] == [{0}, {0}]
    for number, one in enumerate(rounds[2:], start=3):
        # Two of three begin before the buffer is full, the last one after it.
        assert sorted(one.starts) == [number - 3, number - 3, number - 2]


def test_one_client_at_a_time_in_buffers_of_one_is_never_stale() -> None:
    schedule = BufferedSchedule(2, 5, concurrency=1, buffer_size=1)
    for number in range(1, 30):
        assert schedule.round(number).starts == (number - 1,)


def test_durations_of_clients_decide_how_often_they_come() -> None:
    durations = (1.0, 1.0, 4.0)
    schedule = BufferedSchedule(3, 3, concurrency=3, buffer_size=1, durations=durations)
    counts = Counter(client for r in range(1, 901) for client in schedule.in_round(r))
    assert counts == {0: 400, 1: 400, 2: 100}
    slow = [schedule.round(r) for r in range(1, 901) if 2 in schedule.in_round(r)]
    assert {one.time % 4.0 for one in slow} == {0.0}


@pytest.mark.parametrize("law", ["half_normal", "exponential"])
@pytest.mark.parametrize(
    ("clients", "concurrency", "buffer"), [(20, 8, 3), (6, 6, 4), (5, 2, 5), (4, 4, 4), (30, 1, 4)]
)
def test_every_round_keeps_the_rules(law: str, clients: int, concurrency: int, buffer: int) -> None:
    schedule = BufferedSchedule(4, clients, concurrency, buffer, law)  # type: ignore[arg-type]
    last = dict.fromkeys(range(clients), 0)
    time = 0.0
    for number in range(1, 200):
        one = schedule.round(number)
        assert list(one.clients) == sorted(set(one.clients))
        assert len(one.clients) == buffer
        assert one.time >= time
        time = one.time
        for client, start in zip(one.clients, one.starts, strict=True):
            # A client begins after its last update was applied, and before this one is.
            assert last[client] <= start < number
            last[client] = number


def test_clients_are_drawn_uniformly_and_staleness_is_that_of_the_concurrency() -> None:
    # False-alarm rate 1e-4, and the seed is fixed. By Little's law 39 of the other trainings end
    # during one of 40, and every tenth fills the buffer.
    schedule = BufferedSchedule(5, 200, concurrency=40, buffer_size=10)
    counts = Counter(client for r in range(1, 2001) for client in schedule.in_round(r))
    assert stats.chisquare([counts[client] for client in range(200)]).pvalue > 1e-4
    staleness = [
        number - 1 - start for number in range(101, 2001) for start in schedule.round(number).starts
    ]
    assert np.mean(staleness) == pytest.approx(39 / 10, abs=0.02)


def test_a_schedule_is_a_function_of_its_fields() -> None:
    first, again = (BufferedSchedule(6, 12, 5, 2) for _ in range(2))
    assert [first.round(r) for r in (9, 1, 30)] == [again.round(r) for r in (9, 1, 30)]
    assert first == again
    other = BufferedSchedule(7, 12, 5, 2)
    assert [first.in_round(r) for r in range(1, 9)] != [other.in_round(r) for r in range(1, 9)]

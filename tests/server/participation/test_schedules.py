"""Groups that take turns, and availability traces: each against a few lines of its definition."""

from collections import Counter
from collections.abc import Mapping

import pytest
from scipy import stats

from fedsim.server.participation.participation import Participation
from fedsim.server.participation.settings import parse_ranges, ranges_of, ranges_text
from fedsim.server.settings import FederationSettings


def participation(
    settings: Mapping[str, object],
    *,
    clients: int = 10,
    rounds: int = 12,
    per_round: int | None = None,
) -> Participation:
    federation = FederationSettings.model_validate(
        {"rounds": rounds, "clients_per_round": per_round, "participation": settings}
    )
    return Participation.of(federation, num_clients=clients, seed=3, private=True)


def test_ranges_join_what_overlaps_or_touches() -> None:
    assert parse_ranges("7, 1-3,2-5, 6, 9") == [range(1, 8), range(9, 10)]
    assert ranges_text(ranges_of([1, 2, 3, 7, 9, 10])) == "1-3, 7, 9-10"
    assert ranges_of([]) == []
    for wrong in ("", "3-1", "a", "1-", "-2", "1--2", "1_000", "٣"):
        with pytest.raises(ValueError, match="range"):
            parse_ranges(wrong)


def test_groups_take_turns_in_order() -> None:
    plan = participation({"scheme": "cyclic", "groups": 3, "rounds_per_group": 2})
    groups = [(0, 1, 2), (3, 4, 5), (6, 7, 8, 9)]
    assert [plan.in_round(r) for r in range(1, 13)] == [
        groups[turn % 3] for turn in range(6) for _ in range(2)
    ]
    assert plan.planned_rounds() == (4,) * 10
    assert plan.round_sizes == (3, 4)
    assert plan.rounds_of(9) == (5, 6, 11, 12)


def test_members_name_the_groups_and_clients_are_drawn_within_them() -> None:
    settings = {"scheme": "cyclic", "members": ["0, 5-9", "1-4"]}
    plan = participation(settings, rounds=4000, per_round=3)
    counts = Counter(client for r in range(1, 4001) for client in plan.in_round(r))
    for group, turn in (((0, 5, 6, 7, 8, 9), 1), ((1, 2, 3, 4), 0)):
        assert all(set(plan.in_round(r)) < set(group) for r in range(1, 99) if r % 2 == turn)
        # False-alarm rate 1e-4, and the seed is fixed.
        assert stats.chisquare([counts[client] for client in group]).pvalue > 1e-4
    assert plan.round_sizes == (3, 3)


TRACE = "0-2: 1-4\n3: 2, 6\n4-5: 6-7\n"


def test_the_available_clients_take_part_and_empty_rounds_have_none() -> None:
    plan = participation({"scheme": "trace", "availability": TRACE}, rounds=8)
    assert [plan.in_round(r) for r in range(1, 9)] == [
        (0, 1, 2),
        (0, 1, 2, 3),
        (0, 1, 2),
        (0, 1, 2),
        (),
        (3, 4, 5),
        (4, 5),
        (),
    ]
    assert plan.planned_rounds() == (4, 4, 4, 2, 2, 2, 0, 0, 0, 0)
    assert plan.round_sizes == (2, 4)


def test_a_trace_repeats_and_rounds_with_too_few_go_by() -> None:
    settings = {"scheme": "trace", "availability": TRACE, "period": 7, "min_available": 3}
    plan = participation(settings, rounds=20, per_round=3)
    for number in range(1, 21):
        place = (number - 1) % 7 + 1
        available = {client for client, rounds in {0: 4, 1: 4, 2: 4}.items() if place <= rounds} | {
            client for client, at in ((3, 2), (3, 6), (4, 6), (4, 7), (5, 6), (5, 7)) if at == place
        }
        expected = 3 if len(available) >= 3 else 0
        assert len(plan.in_round(number)) == expected
        assert set(plan.in_round(number)) <= available
    assert plan.round_sizes == (3, 3)
    assert plan.in_round(2) != plan.in_round(9) or plan.in_round(9) != plan.in_round(16)


def test_a_trace_without_a_round_has_no_sizes() -> None:
    settings = {"scheme": "trace", "availability": "4: 9-12"}
    assert participation(settings, rounds=8).round_sizes == (0, 0)
    assert participation({**settings, "min_available": 2}, rounds=12).round_sizes == (0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "cyclic", "groups": 4},
        {"scheme": "trace", "availability": TRACE, "period": 5},
        {"scheme": "buffered", "concurrency": 4, "buffer_size": 2},
    ],
)
def test_schedules_follow_from_the_seed_and_added_rounds_change_none(
    settings: Mapping[str, object],
) -> None:
    short, long = participation(settings, rounds=5), participation(settings, rounds=50)
    assert [short.in_round(r) for r in range(1, 6)] == [long.in_round(r) for r in range(1, 6)]
    assert not short.is_secret
    assert short.on_record(2) == short.charged_in(2) == short.draw(2) == short.in_round(2)

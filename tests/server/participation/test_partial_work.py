"""Stragglers: their number, their steps, and rounds that leave them out."""

from collections import Counter

import pytest
from scipy import stats

from fedsim.server.participation.participation import Participation, Stragglers
from fedsim.server.participation.settings import CyclicParticipation, PartialWorkSettings
from fedsim.server.settings import FederationSettings


def participation(share: float, on_partial: str, *, per_round: int | None = 5) -> Participation:
    settings = {
        "rounds": 400,
        "clients_per_round": per_round,
        "partial_work": {"share": share, "on_partial": on_partial},
    }
    federation = FederationSettings.model_validate(settings)
    return Participation.of(federation, num_clients=10, seed=4)


def test_a_share_of_the_clients_of_a_round_straggles() -> None:
    plan = participation(0.5, "keep")
    counts = Counter[int]()
    for number in range(1, 401):
        slow = plan.stragglers_in(number)
        assert slow < set(plan.in_round(number))
        assert len(slow) == 3  # 2.5 is rounded up
        counts.update(slow)
    # False-alarm rate 1e-4, and the seed is fixed.
    assert stats.chisquare([counts[client] for client in range(10)]).pvalue > 1e-4
    assert [Stragglers(0, share).count(10) for share in (0.04, 0.05, 0.9, 1.0)] == [0, 1, 9, 10]


def test_steps_of_stragglers_are_uniform_below_those_of_a_whole_round() -> None:
    stragglers = Stragglers(1, 0.5)
    found = Counter(stragglers.steps(k, t, 5) for k in range(50) for t in range(1, 41))
    assert sorted(found) == [1, 2, 3, 4]
    assert stats.chisquare(list(found.values())).pvalue > 1e-4
    assert stragglers.steps(0, 1, 1) == 1
    again = Stragglers(1, 0.9)
    assert again.steps(3, 7, 50) == stragglers.steps(3, 7, 50)


def test_rounds_without_their_stragglers() -> None:
    kept, dropped = participation(0.4, "keep"), participation(0.4, "drop")
    for number in range(1, 20):
        slow = kept.stragglers_in(number)
        assert slow == dropped.stragglers_in(number)
        assert set(dropped.in_round(number)) == set(kept.in_round(number)) - slow
    assert dropped.round_sizes == (3, 3)
    assert sum(dropped.planned_rounds()) == 3 * 400
    everybody = participation(0.4, "drop", per_round=None)
    assert everybody.round_sizes == (6, 6)
    assert sum(everybody.planned_rounds()) == 6 * 400


@pytest.mark.parametrize(("share", "sizes"), [(0.4, (1, 2)), (0.5, (1, 1)), (1.0, (0, 0))])
def test_rounds_that_lose_all_their_clients_do_not_count_for_the_smallest(
    share: float, sizes: tuple[int, int]
) -> None:
    groups = CyclicParticipation(scheme="cyclic", members=["0", "1-3"])
    work = PartialWorkSettings(share=share, on_partial="drop")
    plan = Participation(0, 4, 4, 8, groups, partial_work=work)
    assert plan.round_sizes == sizes
    assert len(plan.in_round(2)) == sizes[1]

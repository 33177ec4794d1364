from collections import Counter

from scipy import stats

from fedsim.server.participation import Participation
from fedsim.server.settings import FederationSettings


def schedule(clients_per_round: int | None, *, rounds: int = 50, seed: int = 1) -> Participation:
    settings = FederationSettings(rounds=rounds, clients_per_round=clients_per_round)
    return Participation.of(settings, num_clients=10, seed=seed)


def test_everybody_by_default() -> None:
    assert schedule(None).in_round(7) == tuple(range(10))
    assert schedule(None).planned_rounds() == (50,) * 10


def test_schedule_is_fixed_by_the_seed_and_does_not_depend_on_the_number_of_rounds() -> None:
    short, long = schedule(3, rounds=5), schedule(3, rounds=500)
    assert [short.in_round(r) for r in range(1, 6)] == [long.in_round(r) for r in range(1, 6)]
    assert schedule(3, seed=1).in_round(1) != schedule(3, seed=2).in_round(1)


def test_planned_rounds_count_the_schedule() -> None:
    plan = schedule(4)
    counts = Counter(client for r in range(1, 51) for client in plan.in_round(r))
    assert plan.planned_rounds() == tuple(counts[client] for client in range(10))
    assert sum(plan.planned_rounds()) == 4 * 50


def test_participants_are_distinct_ascending_and_uniform() -> None:
    # False-alarm rate 1e-4: chi-square over clients, and the seed is fixed.
    plan = schedule(3, rounds=3000)
    counts = Counter[int]()
    for r in range(1, 3001):
        clients = plan.in_round(r)
        assert len(set(clients)) == 3
        assert list(clients) == sorted(clients)
        counts.update(clients)
    assert stats.chisquare([counts[client] for client in range(10)]).pvalue > 1e-4

from collections import Counter

import numpy as np
from scipy import stats

from fedsim.server.participation.participation import Participation
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


def poisson(clients_per_round: int = 3, **options: bool) -> Participation:
    settings = FederationSettings.model_validate(
        {
            "rounds": 2000,
            "clients_per_round": clients_per_round,
            "participation": {"scheme": "poisson"},
        }
    )
    return Participation.of(settings, num_clients=10, seed=1, **options)


def test_poisson_draws_are_independent_and_of_the_rate() -> None:
    # False-alarm rate 1e-4 each: pairs of clients, and numbers of participants. The seed is fixed.
    plan, rounds = poisson(), 2000
    drawn = np.zeros((rounds, 10), dtype=bool)
    for number in range(rounds):
        drawn[number, list(plan.in_round(number + 1))] = True
    assert plan.rate == 0.3
    assert _law(drawn, 0.3) > 1e-4
    assert _law(drawn, 0.28) < 1e-4  # a slightly wrong rate is rejected
    uniform = np.zeros_like(drawn)
    for number in range(rounds):
        uniform[number, list(schedule(3, rounds=rounds).in_round(number + 1))] = True
    assert _law(uniform, 0.3) < 1e-4  # and so are draws of a fixed number
    together = float((drawn[:, 0] & drawn[:, 1]).sum())
    assert min(stats.binom(rounds, 0.09).cdf(together), stats.binom(rounds, 0.09).sf(together)) > (
        0.5e-4
    )


def _law(drawn: np.ndarray, rate: float) -> float:
    """Return the p-value of the numbers of participants under the binomial law."""
    found = np.bincount(drawn.sum(axis=1), minlength=11)
    expected = stats.binom.pmf(np.arange(11), 10, rate) * len(drawn)
    cut = 7  # rarer numbers are counted together
    found = np.append(found[:cut], found[cut:].sum())
    expected = np.append(expected[:cut], expected[cut:].sum())
    return float(stats.chisquare(found, expected).pvalue)


def test_everybody_is_drawn_with_rate_1() -> None:
    assert poisson(10).draw(1) == tuple(range(10))
    assert poisson(10, private=True, secure_noise=True).draw(1) == tuple(range(10))


def test_a_public_poisson_schedule_charges_those_that_were_drawn() -> None:
    plan = poisson()
    assert plan.on_record(5) == plan.charged_in(5) == plan.in_round(5) == plan.draw(5)
    assert plan.planned_rounds()[0] == sum(0 in plan.in_round(n) for n in range(1, 2001))


def test_a_secret_draw_charges_everybody_and_names_nobody() -> None:
    plan = poisson(private=True)
    assert plan.draw(5) == poisson().in_round(5)
    assert plan.planned_rounds() == (2000,) * 10
    assert plan.rounds_of(4) == tuple(range(1, 2001))
    assert plan.charged_in(5) == tuple(range(10))
    assert plan.on_record(5) == ()


def test_without_a_key_no_schedule_exists() -> None:
    # False-alarm rate 1e-9: two sequences of 100 draws are equal with probability (0.58)^1000.
    plan = poisson(private=True, secure_noise=True)
    first, second = ([plan.draw(n) for n in range(1, 101)] for _ in range(2))
    assert first != second
    assert plan.in_round(1) == tuple(range(10))
    drawn = sum(map(len, first + second))
    assert 1e-9 < stats.binom(2000, 0.3).cdf(drawn) < 1 - 1e-9


def test_secure_noise_changes_nothing_of_a_public_schedule() -> None:
    settings = FederationSettings(rounds=5, clients_per_round=3)
    plain = Participation.of(settings, num_clients=10, seed=1)
    assert (
        Participation.of(settings, num_clients=10, seed=1, private=True, secure_noise=True) == plain
    )

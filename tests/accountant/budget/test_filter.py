"""Filters never grant beyond the target, whatever is asked, and refuse what is not valid."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import (
    ZCDP,
    EpsilonDelta,
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    PrivacyLedger,
    UnsupportedEventError,
    make_accountant,
)
from fedsim.accountant.privacy_filter import FixedSchedule, PrivacyFilter
from fedsim.accountant.rdp.poisson import rdp_sampled_gaussian
from fedsim.accountant.search import MOST, largest_count

STEP = PoissonSampled(0.1, Gaussian(1.2))
EVENTS: list[Event] = [
    STEP,
    PoissonSampled(0.02, Gaussian(0.8)),
    Gaussian(12.0),
    PoissonSampled(0.5, Gaussian(0.05)),  # too loud for most targets
    PoissonSampled(0.0, Gaussian(1.0)),
    NonPrivate(),
]
asked = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 300)), max_size=8)


def spent(ledger: PrivacyLedger, name: Any, delta: float = 1e-5) -> float:
    return ledger.compose_into(make_accountant(name)).get_epsilon(delta)


@pytest.mark.parametrize("name", ["pld", "rdp", "moments"])
@given(requests=asked, target=st.floats(0.1, 12.0))
@settings(max_examples=10, deadline=None)
def test_guarantee_a_fixed_schedule_never_exceeds_the_target(
    name: Any, requests: Any, target: float
) -> None:
    budget = PrivacyFilter(target, 1e-5, accountant=name)
    for event, count in requests:
        granted = budget.request(event, count)
        assert 0 <= granted <= count
        assert spent(budget.ledger, name) <= target * (1 + 1e-9)
        if granted < count:  # not one more would fit
            assert not budget.is_affordable(event)
            more = PrivacyLedger().merge(budget.ledger).record(event)
            assert spent(more, name) > target
    assert budget.spent == pytest.approx(spent(budget.ledger, name), rel=1e-9)


@given(requests=asked, target=st.floats(0.3, 12.0), order=st.sampled_from([None, 8.0, 32.0, 64.5]))
@settings(max_examples=20, deadline=None)
def test_guarantee_an_adaptive_one_never_exceeds_its_order(
    requests: Any, target: float, order: float | None
) -> None:
    delta = 1e-5
    try:
        budget = PrivacyFilter(target, delta, mode="adaptive", order=order)
    except ValueError:
        assert order == 8.0  # log(1/delta) / 7 alone is above the target
        return
    alpha = budget.order
    assert alpha is not None
    limit = target - math.log1p(-1 / alpha) + (math.log(delta) + math.log(alpha)) / (alpha - 1)
    used = 0.0
    for event, count in requests:
        granted = budget.request(event, count)
        cost = rdp_at(event, alpha)
        used += granted * cost if granted else 0.0
        assert used <= limit
        if granted < count:
            assert used + cost > limit * (1 - 1e-9)
    assert budget.spent <= target
    assert spent(budget.ledger, "rdp") <= target


def rdp_at(event: Event, order: float) -> float:
    match event:
        case Gaussian(noise_multiplier=z):
            return float(rdp_sampled_gaussian(1.0, z, (order,))[0])
        case PoissonSampled(sampling_rate=q, event=Gaussian(noise_multiplier=z)):
            return float(rdp_sampled_gaussian(q, z, (order,))[0])
        case _:
            return math.inf


def test_counts_down() -> None:
    budget = PrivacyFilter(4.0, 1e-5)
    most = budget.max_count(STEP)
    assert most > 10
    assert budget.is_affordable(STEP, most)
    assert not budget.is_affordable(STEP, most + 1)
    assert budget.request(STEP, 10) == 10
    assert budget.max_count(STEP) == most - 10
    assert budget.request(STEP, most) == most - 10
    assert budget.request(STEP) == 0
    assert not budget.is_affordable(STEP)
    assert budget.is_affordable(STEP, 0)
    assert budget.ledger == PrivacyLedger().record(STEP, most)
    # Counted down or found anew, the answer is the same.
    fresh = PrivacyFilter(4.0, 1e-5)
    fresh.record(STEP, 10)
    assert fresh.max_count(STEP) == most - 10


def test_other_events_reduce_what_is_left() -> None:
    budget = PrivacyFilter(4.0, 1e-5)
    most = budget.max_count(STEP)
    assert budget.request(Gaussian(5.0), 3) == 3
    assert budget.max_count(STEP) < most
    equal = PoissonSampled(0.1, Gaussian(1.2))
    assert budget.max_count(equal) == budget.max_count(STEP)


def test_what_happened_already_counts_even_beyond_the_target() -> None:
    budget = PrivacyFilter(1.0, 1e-5)
    budget.record(Gaussian(1.0), 5)
    assert budget.spent > 1.0
    assert budget.request(STEP) == 0
    assert budget.max_count(PoissonSampled(0.0, Gaussian(1.0))) == 0


def test_free_events_are_never_refused() -> None:
    for budget in (PrivacyFilter(1.0, 1e-5), PrivacyFilter(1.0, 1e-5, mode="adaptive")):
        free = PoissonSampled(0.0, Gaussian(1.0))
        assert budget.max_count(free) == MOST
        assert budget.request(free, 1000) == 1000
        assert budget.spent == 0.0
        assert budget.request(NonPrivate()) == 0


def test_the_invalid_combination_names_the_reason_and_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"arXiv:2602\.06756.*use accountant='rdp'.*fixed_schedule"
    ):
        PrivacyFilter(1.0, 1e-5, mode="adaptive", accountant="pld")
    with pytest.raises(ValueError, match="use accountant='rdp'"):
        PrivacyFilter(1.0, 1e-5, mode="adaptive", accountant="moments")


def test_an_order_is_fixed_or_chosen_without_looking() -> None:
    budget = PrivacyFilter(1.0, 1e-5, mode="adaptive")
    assert budget.order == PrivacyFilter(1.0, 1e-5, mode="adaptive", accountant="rdp").order
    assert PrivacyFilter(1.0, 1e-5).order is None
    # No other order has room for more Gaussians.
    counts = [
        PrivacyFilter(1.0, 1e-5, mode="adaptive", order=order).max_count(Gaussian(50.0))
        for order in (16.0, 24.0, 32.0, 48.0, 64.0)
    ]
    assert max(counts) <= budget.max_count(Gaussian(50.0))
    with pytest.raises(ValueError, match=r"order=2\.0 leaves no budget"):
        PrivacyFilter(1.0, 1e-5, mode="adaptive", order=2.0)
    with pytest.raises(ValueError, match="order must be None"):
        PrivacyFilter(1.0, 1e-5, order=2.0)


def test_adaptive_is_close_to_the_schedule_known_in_advance() -> None:
    fixed = PrivacyFilter(8.0, 1e-5, accountant="rdp").max_count(STEP)
    best = make_accountant("rdp").compose(STEP, fixed).get_privacy_spent(1e-5).best_order
    adaptive = PrivacyFilter(8.0, 1e-5, mode="adaptive", order=best).max_count(STEP)
    assert 0.99 * fixed <= adaptive <= fixed


def test_events_with_a_delta_of_their_own() -> None:
    leaky = EpsilonDelta(0.1, 1e-7)
    assert PrivacyFilter(2.0, 1e-5).request(leaky, 3) == 3
    with pytest.raises(UnsupportedEventError, match="mode 'adaptive'"):
        PrivacyFilter(2.0, 1e-5, mode="adaptive").is_affordable(leaky)
    assert PrivacyFilter(2.0, 1e-5, mode="adaptive").request(ZCDP(0.001), 2) == 2


def test_adjacency_is_handed_on() -> None:
    for mode in ("fixed_schedule", "adaptive"):
        near: Any = {"mode": mode}
        zero_out = PrivacyFilter(2.0, 1e-5, **near).max_count(Gaussian(20.0))
        replace = PrivacyFilter(2.0, 1e-5, **near, adjacency="replace_one").max_count(
            Gaussian(20.0)
        )
        assert replace == pytest.approx(zero_out / 4, abs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be"),
        ({"delta": 1.0}, "delta must"),
        ({"mode": "odometer"}, "mode must be one of"),
        ({"accountant": "gdp"}, "accountant must be one of"),
        ({"adjacency": "neighbour"}, "adjacency must be one of"),
        ({"mode": "adaptive", "order": 1.0}, "orders must lie in"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(ValueError, match=message):
        PrivacyFilter(**arguments | change)


def test_a_refused_question_changes_nothing() -> None:
    budget = PrivacyFilter(4.0, 1e-5)
    most = budget.max_count(STEP)
    bad: Any = "event"
    for ask in (budget.is_affordable, budget.request, budget.record):
        with pytest.raises(ValueError, match="event must be"):
            ask(bad)
        with pytest.raises(ValueError, match="count must be"):
            ask(STEP, -1)
        with pytest.raises(ValueError, match="count must be"):
            ask(STEP, 0.5)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedEventError):
            ask(PoissonSampled(0.5, STEP))
    assert budget.max_count(STEP) == most
    assert len(budget.ledger) == 0


def test_asking_again_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = PrivacyFilter(8.0, 1e-5)
    search, asked_of = FixedSchedule.max_count, []

    def counted(self: FixedSchedule, event: Event) -> int:
        asked_of.append(event)
        return search(self, event)

    monkeypatch.setattr(FixedSchedule, "max_count", counted)
    for _ in range(1000):
        assert budget.is_affordable(STEP)
    assert asked_of == [STEP]


@given(
    scale=st.floats(1e-8, 10.0),
    power=st.sampled_from([0.5, 0.7, 1.0, 2.0]),
    limit=st.floats(0.01, 100.0),
    start=st.sampled_from([1, 7, 1000, 10**9, MOST]),
)
@settings(max_examples=50, deadline=None)
def test_the_search_finds_the_largest_count(
    scale: float, power: float, limit: float, start: int
) -> None:
    calls = 0

    def cost(count: int) -> float:
        nonlocal calls
        calls += 1
        assert 1 <= count <= MOST
        return scale * count**power

    found = largest_count(cost, limit, start)
    assert found == 0 or cost(found) <= limit
    assert found == MOST or cost(found + 1) > limit
    assert calls < 120


def test_the_search_with_costs_that_jump() -> None:
    assert largest_count(lambda n: 0.0 if n < 12345 else math.inf, 1.0) == 12344
    assert largest_count(lambda n: float(np.floor(n / 1000)), 5.0) == 5999
    assert largest_count(lambda _: 0.0, 1.0) == MOST
    assert largest_count(lambda _: 2.0, 1.0, start=50) == 0

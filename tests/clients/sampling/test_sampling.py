"""Batches are drawn as the event says that they are charged for."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsim.accountant import (
    EpochShuffled,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    PrivacyLedger,
    RandomAllocation,
    make_accountant,
)
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.events import ADJACENCIES
from fedsim.clients.sampling.divided_batches import (
    SAMPLINGS,
    BallsAndBins,
    BallsAndBinsByRound,
    ShuffledEpochs,
)
from fedsim.clients.sampling.sampling import (
    EpochBatches,
    FixedSizeSampling,
    IndependentBatches,
    PoissonSampling,
    Sampling,
)
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES, SamplingName

DOCS = Path(__file__).parents[3] / "docs"
# Statistical tests have a false-alarm rate of at most 1e-4 each, and fixed seeds.
ALPHA = 1e-4
Z = Gaussian(1.1)


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def epoch_stream(number: int) -> np.random.Generator:
    return np.random.default_rng([7, number])


def batches_of(sampling: Sampling, n: int, *, first_step: int = 0, seed: int = 0) -> Iterator:
    return sampling.draw_batches(n, stream(seed), epochs=epoch_stream, first_step=first_step)


def draw(sampling: Sampling, n: int, steps: int) -> list[np.ndarray]:
    return list(islice(batches_of(sampling, n), steps))


def check_uniform(outcomes: list[tuple[int, ...]], possible: list[tuple[int, ...]]) -> None:
    counts = Counter(outcomes)
    assert set(counts) <= set(possible)
    assert stats.chisquare([counts[outcome] for outcome in possible]).pvalue > ALPHA


def check_pairs(outcomes: list[tuple[int, ...]], possible: int) -> None:
    """Successive outcomes are independent: disjoint pairs of them are uniform."""
    counts = Counter(zip(outcomes[::2], outcomes[1::2], strict=True))
    assert len(counts) == possible**2
    assert stats.chisquare(list(counts.values())).pvalue > ALPHA


def check_poisson(sampling: Sampling, rate: float) -> None:
    """Sizes are Binomial(n, q), examples equally likely, pairs and steps uncorrelated."""
    count, steps = 40, 8000
    included = np.zeros((steps, count))
    for row, batch in zip(included, batches_of(sampling, count), strict=False):
        row[batch] = 1
    sizes = included.sum(1)
    low, high = (int(edge) for edge in stats.binom.interval(0.97, count, rate))
    bins = np.arange(low, high + 1)
    observed = [np.sum(sizes < low), *(np.sum(sizes == b) for b in bins), np.sum(sizes > high)]
    expected = [
        stats.binom.cdf(low - 1, count, rate),
        *stats.binom.pmf(bins, count, rate),
        stats.binom.sf(high, count, rate),
    ]
    assert stats.chisquare(observed, np.array(expected) * steps).pvalue > ALPHA
    inclusions = included.sum(0)
    spread = np.sum((inclusions - steps * rate) ** 2) / (steps * rate * (1 - rate))
    assert ALPHA / 2 < stats.chi2.sf(spread, count) < 1 - ALPHA / 2
    correlation = np.asarray(np.corrcoef(included.T))[np.triu_indices(count, 1)]
    assert np.abs(correlation).max() < 5.6 / np.sqrt(steps)  # 780 pairs: 2e-5
    successive = np.asarray(np.corrcoef(included[:-1].ravel(), included[1:].ravel()))
    assert abs(successive[0, 1]) < 4 / np.sqrt(steps * count)


def check_charged_as_drawn(sampling: Sampling) -> None:
    """The check that a sampler cannot pass whose batches are not what its event says."""
    event = sampling.event(Z)
    if isinstance(event, PoissonSampled):
        check_poisson(sampling, event.sampling_rate)
    else:
        assert isinstance(event, EpochShuffled | RandomAllocation)
        for epoch in range(3):
            batches = list(
                islice(batches_of(sampling, 23, first_step=epoch * event.batches), event.batches)
            )
            assert sorted(np.concatenate(batches)) == list(range(23))


def test_poisson_sampling_is_independent_inclusion() -> None:
    check_charged_as_drawn(PoissonSampling(0.15))


def test_poisson_batches_are_empty_as_often_as_they_should_be() -> None:
    # P(empty) = 0.9^5 = 0.59; four standard errors: a false-alarm rate of 6e-5.
    empty = np.mean([len(batch) == 0 for batch in draw(PoissonSampling(0.1), 5, 5000)])
    assert abs(empty - 0.9**5) < 4 * np.sqrt(0.59 * 0.41 / 5000)


def test_poisson_batches_follow_one_stream() -> None:
    """What a round draws in one go is what it draws step by step."""
    sampling, steps = PoissonSampling(0.3), stream()
    for batch in draw(sampling, 20, 10):
        np.testing.assert_array_equal(batch, sampling.draw_batch(20, steps))


def test_batches_of_fixed_size_are_uniform_subsets() -> None:
    batches = draw(FixedSizeSampling(5, 2), 5, 10_000)
    outcomes = [tuple(batch.tolist()) for batch in batches]
    check_uniform(outcomes, list(combinations(range(5), 2)))
    check_pairs(outcomes, 10)


def test_batches_of_fixed_size_need_the_public_number_of_examples() -> None:
    with pytest.raises(ValueError, match="charged for 5 examples, got 6"):
        FixedSizeSampling(5, 2).draw_batch(6, stream())
    with pytest.raises(ValueError, match="between 1 and the population 5"):
        FixedSizeSampling(5, 6)


@pytest.mark.parametrize("kind", [ShuffledEpochs, BallsAndBins])
@pytest.mark.parametrize("batches", [1, 4, 30])
def test_an_epoch_has_each_example_once(kind: type[EpochBatches], batches: int) -> None:
    check_charged_as_drawn(kind(batches))


def test_shuffled_epochs_are_uniform_and_differ() -> None:
    batches = draw(ShuffledEpochs(2), 4, 6000)
    assert {len(batch) for batch in batches} == {2}
    firsts = [tuple(sorted(batch.tolist())) for batch in batches[::2]]
    check_uniform(firsts, list(combinations(range(4), 2)))
    check_pairs(firsts, 6)


def test_shuffled_batches_have_even_length() -> None:
    assert sorted(len(batch) for batch in draw(ShuffledEpochs(4), 23, 4)) == [5, 6, 6, 6]


def test_balls_and_bins_allocates_independently() -> None:
    batches = iter(draw(BallsAndBins(3), 2, 3 * 4500))
    homes = []
    for epoch in zip(batches, batches, batches, strict=True):
        homes.append(tuple(next(b for b, batch in enumerate(epoch) if i in batch) for i in (0, 1)))
    check_uniform(homes, [(a, b) for a in range(3) for b in range(3)])


@pytest.mark.parametrize("sampling", [ShuffledEpochs(5), BallsAndBins(5)])
def test_epochs_go_on_over_rounds(sampling: Sampling) -> None:
    """Rounds of 3 steps, each with a stream of its own, see the batches of one long round."""
    whole = draw(sampling, 17, 15)
    parts = [
        batch
        for number in range(5)
        for batch in islice(batches_of(sampling, 17, first_step=3 * number, seed=number), 3)
    ]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("sampling", "event"),
    [
        (PoissonSampling(0.2), PoissonSampled(0.2, Z)),
        (FixedSizeSampling(50, 10), FixedSizeSampled(50, 10, Z)),
    ],
)
def test_independent_batches_cost_an_event_a_step(sampling: Sampling, event: Event) -> None:
    assert sampling.event(Z) == event
    assert sampling.sampling_rate == 0.2
    assert sampling.charges(Z, 13, 5) == [(event, 5)]
    assert sampling.charges(Z, 13, 0) == []


@pytest.mark.parametrize(
    ("sampling", "event"),
    [(ShuffledEpochs(4), EpochShuffled(4, Z)), (BallsAndBins(4), RandomAllocation(4, Z))],
)
def test_an_epoch_is_charged_when_it_starts(sampling: Sampling, event: Event) -> None:
    assert sampling.event(Z) == event
    assert sampling.sampling_rate == 0.25
    assert sampling.charges(Z, 0, 1) == [(event, 1)]
    assert sampling.charges(Z, 1, 3) == []
    assert sampling.charges(Z, 1, 4) == [(event, 1)]
    assert sampling.charges(Z, 4, 8) == [(event, 2)]
    assert sampling.charges(Z, 3, 2) == [(event, 1)]
    assert sampling.charges(Z, 4, 0) == []


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
def test_secret_epochs_start_anew_in_every_round_and_are_charged_in_full(
    batches: int, round_steps: int, rounds: int, last: int
) -> None:
    """What a client releases is at most what its charges pay for.

    The batches of each round are cut into divisions of all examples: one begins when the round does
    or when `batches` batches are drawn, and each is charged. No division has an example twice.
    """
    sampling, n = BallsAndBins(batches).within_rounds(round_steps), 12
    steps_of = [round_steps] * rounds + [min(last, round_steps)]
    paid = begun = done = 0
    for number, steps in enumerate(steps_of):
        drawn = list(islice(batches_of(sampling, n, first_step=done, seed=number), steps))
        for start in range(0, steps, batches):
            division = np.concatenate(drawn[start : start + batches])
            assert len(set(division)) == len(division) <= n
            assert len(division) == n or start + batches > steps
            begun += 1
        paid += sum(count for _, count in sampling.charges(Z, done, steps))
        done += steps
    assert paid == begun
    assert paid == sum(count for _, count in sampling.charges(Z, 0, done))


def test_secret_epochs_are_charged_as_what_they_are() -> None:
    """Rounds shorter than an epoch, of one epoch, and over two; and a round that is repeated."""
    event = RandomAllocation(4, Z)
    for round_steps, count in ((1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        sampling = BallsAndBinsByRound(4, round_steps)
        assert sampling.event(Z) == event
        for number in (0, 1, 7):  # a repetition is charged as a further round
            assert sampling.charges(Z, number * round_steps, round_steps) == [(event, count)]
        assert sampling.charges(Z, 0, 7 * round_steps) == [(event, 7 * count)]
    assert BallsAndBinsByRound(4, 9).charges(Z, 9, 5) == [(event, 2)]  # the last round of a budget
    assert BallsAndBinsByRound(4, 9).charges(Z, 18, 0) == []


def test_secret_epochs_use_the_stream_of_the_round_alone() -> None:
    sampling = BallsAndBinsByRound(4, 6)
    first, again, other = (
        list(islice(batches_of(sampling, 50, first_step=step, seed=seed), 6))
        for step, seed in ((0, 1), (6, 1), (0, 2))
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(np.concatenate(first[:4]), np.concatenate(other[:4]))
    assert not np.array_equal(first[0], first[4]), "the second epoch is a division of its own"


def test_secret_epochs_cannot_be_continued() -> None:
    sampling = BallsAndBinsByRound(4, 6)
    for step in (1, 5, 7, 11):
        with pytest.raises(ValueError, match=f"step {step} is within an epoch"):
            next(batches_of(sampling, 9, first_step=step))
        with pytest.raises(ValueError, match=f"step {step} is within an epoch"):
            sampling.charges(Z, step, 1)
    with pytest.raises(ValueError, match="at least one step"):
        BallsAndBinsByRound(4, 0)


@pytest.mark.parametrize("sampling", [PoissonSampling(0.2), FixedSizeSampling(9, 2)])
def test_independent_batches_are_the_same_within_rounds(sampling: Sampling) -> None:
    assert sampling.within_rounds(3) is sampling


@given(
    st.sampled_from(
        [PoissonSampling(0.2), FixedSizeSampling(9, 2), ShuffledEpochs(4), BallsAndBins(7)]
    ),
    st.lists(st.integers(0, 12), max_size=8),
)
def test_charges_do_not_depend_on_how_steps_are_cut_into_rounds(
    sampling: Sampling, rounds: list[int]
) -> None:
    ledger, done = PrivacyLedger(), 0
    for steps in rounds:
        for event, count in sampling.charges(Z, done, steps):
            ledger.record(event, count)
        done += steps
    assert list(ledger.entries) == sampling.charges(Z, 0, done)


def test_every_name_has_a_scheme_and_a_sampler() -> None:
    assert get_args(SamplingName) == tuple(SAMPLING_SCHEMES) == tuple(SAMPLINGS)


def _can_be_spaced(sampling: Sampling) -> bool:
    try:
        return sampling.spaced(2).separation >= 2
    except ValueError:
        return False


@pytest.mark.parametrize("name", SAMPLING_SCHEMES)
def test_a_scheme_says_of_its_sampler_what_is_true(name: str) -> None:
    scheme, kind = SAMPLING_SCHEMES[name], SAMPLINGS[name]
    sampling, expected_batch = kind.for_client(12, 4)
    assert kind.scheme is scheme
    assert type(sampling.event(Z)).__name__ == scheme.event
    assert isinstance(sampling, IndependentBatches) != scheme.by_epoch
    assert _can_be_spaced(sampling) == scheme.is_cyclic
    assert expected_batch == pytest.approx(12 * sampling.sampling_rate)
    assert (scheme.obstacle == "") == (set(scheme.adjacencies) == set(ADJACENCIES))
    assert scheme.statement[:1].islower()
    assert not scheme.statement.endswith(".")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("name", SAMPLING_SCHEMES)
def test_accountants_have_a_rule_for_every_adjacency_of_a_scheme(
    name: str, accountant: AccountantName
) -> None:
    sampling, _ = SAMPLINGS[name].for_client(12, 4)
    for adjacency in SAMPLING_SCHEMES[name].adjacencies:
        composed = make_accountant(accountant, adjacency=adjacency).compose(sampling.event(Z))
        assert 0 < composed.get_epsilon(1e-5) < 20


@pytest.mark.skipif(not DOCS.exists(), reason="reads the pages of a checkout")
@pytest.mark.parametrize("name", SAMPLING_SCHEMES)
def test_the_page_has_a_row_for_every_sampling(name: str) -> None:
    scheme = SAMPLING_SCHEMES[name]
    rows = (DOCS / "explain" / "dp_sgd.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
    assert all(f"`{adjacency}`" in row for adjacency in scheme.adjacencies) or "| any" in row
    assert f"`{scheme.event}`" in row


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        PoissonSampling(rate)


@pytest.mark.parametrize("kind", [ShuffledEpochs, BallsAndBins])
def test_an_epoch_has_batches(kind: type[EpochBatches]) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        kind(0)


class ShuffledClaimedAsPoisson(ShuffledEpochs):
    """The bug that the literature finds most often (Chua et al. 2024)."""

    def event(self, mechanism: Event) -> PoissonSampled:  # type: ignore[override]
        return PoissonSampled(self.sampling_rate, mechanism)


class OneShuffleForAll(BallsAndBins):
    """Draws a batch for each step anew, so an example may be in two batches of an epoch."""

    def draw_batches(self, num_examples: int, stream: np.random.Generator, **_: object) -> Iterator:
        while True:
            yield np.flatnonzero(stream.integers(self.batches, size=num_examples) == 0)


@pytest.mark.parametrize("wrong", [ShuffledClaimedAsPoisson(5), OneShuffleForAll(5)])
def test_mutation_batches_that_are_charged_as_something_else_are_caught(wrong: Sampling) -> None:
    with pytest.raises(AssertionError):
        check_charged_as_drawn(wrong)

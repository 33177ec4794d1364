"""A fleet's answers are those of one accountant per client."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import (
    ZCDP,
    Composed,
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    NonPrivate,
    PoissonSampled,
    SelfComposed,
    UnsupportedEventError,
    make_accountant,
)
from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.fleet import FleetAccountant
from fedsim.accountant.pld import fleet as fleet_pld
from fedsim.accountant.pld.distribution import pld_epsilon
from fedsim.accountant.pld.fleet import pld_epsilons
from fedsim.accountant.pld.fourier import circular, fft_size, power

STEP = PoissonSampled(0.1, Gaussian(1.0))
EXOTIC: list[Event] = [
    ZCDP(0.01),
    EpsilonDelta(0.5, 1e-7),
    JointGaussian((4.0, 3.0)),
    Composed((STEP, SelfComposed(Gaussian(8.0), 3))),
    PoissonSampled(0.0, Gaussian(1.0)),
    PoissonSampled(0.3, Gaussian(0.2)),
    Gaussian(5.0),
    NonPrivate(),
]


def sampled(rate: float, noise: float) -> Event:
    return PoissonSampled(rate, Gaussian(noise))


def single(name: Any, events: list[tuple[Event, int]], delta: float, **settings_: Any) -> float:
    accountant = make_accountant(name, **settings_)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(delta)


steps = st.builds(sampled, st.floats(1e-4, 1.0), st.floats(0.3, 20.0))
histories = st.lists(st.tuples(steps, st.integers(0, 3000)), max_size=4)


@given(clients=st.lists(histories, min_size=1, max_size=8), delta=st.sampled_from([1e-3, 1e-6]))
@settings(max_examples=12, deadline=None)
def test_guarantee_rdp_is_that_of_single_accountants(clients: Any, delta: float) -> None:
    fleet = FleetAccountant("rdp")
    for client, history in enumerate(clients):
        for event, count in history:
            fleet.compose(client, event, count)
    answers = fleet.get_epsilon(delta)
    for client, history in enumerate(clients):
        expected = single("rdp", history, delta)
        assert answers.get(client, 0.0) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["rdp", "pld", "moments"])
def test_every_event_counts_as_in_a_single_accountant(name: Any) -> None:
    fleet = FleetAccountant(name)
    for client, event in enumerate(EXOTIC):
        fleet.compose(client, event, 3).compose(client, STEP, 10)
    answers = fleet.get_epsilon(1e-5)
    for client, event in enumerate(EXOTIC):
        expected = single(name, [(event, 3), (STEP, 10)], 1e-5)
        assert answers[client] == pytest.approx(expected, abs=2e-4 if name == "pld" else 1e-12)
    assert answers[len(EXOTIC) - 1] == math.inf


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_adjacency_is_handed_on(name: Any) -> None:
    event = FixedSizeSampled(1000, 20, Gaussian(2.0))
    fleet = FleetAccountant(name, adjacency="replace_one")
    fleet.compose("a", event, 100).compose("b", Gaussian(4.0), 5).compose("c", STEP, 20)
    answers = fleet.get_epsilon(1e-5)
    for client, what in (("a", (event, 100)), ("b", (Gaussian(4.0), 5)), ("c", (STEP, 20))):
        expected = single(name, [what], 1e-5, adjacency="replace_one")
        assert answers[client] == pytest.approx(expected, abs=2e-4)
    with pytest.raises(UnsupportedEventError):
        FleetAccountant(name).compose("a", event)


def federation(number: int, seed: int) -> list[dict[Any, int]]:
    rng = np.random.default_rng(seed)
    rates = np.exp(rng.uniform(math.log(0.006), math.log(0.16), number))
    noises = np.exp(rng.uniform(math.log(0.6), math.log(2.5), number))
    counts = np.exp(rng.uniform(math.log(2), math.log(3543), number)).round().astype(int)
    columns = (rates.tolist(), noises.tolist(), counts.tolist())
    return [{SampledGaussian(q, z): t} for q, z, t in zip(*columns, strict=True)]


def test_guarantee_pld_is_never_below_the_exact_value_and_close_to_the_single_accountant(
    saddle_point: ModuleType,
) -> None:
    clients = 10
    compositions = [*federation(clients, seed=1), {SampledGaussian(0.9, 1.0): 10}]
    compositions.append({SampledGaussian(0.05, 0.8): 30, SampledGaussian(1.0, 5.0): 4})
    compositions.append({**compositions[0], **compositions[1]})
    compared = 0
    for delta in (1e-3, 1e-6):
        ours = pld_epsilons(compositions, delta)
        for steps_, epsilon in zip(compositions, ours, strict=True):
            assert epsilon == pytest.approx(pld_epsilon(steps_, delta), abs=2e-4)
            if sum(steps_.values()) < 30:
                continue  # the inversion is slow to find out that it cannot do these
            try:
                exact = saddle_point.near_exact_epsilon(steps_, delta)
            except saddle_point.InversionError:
                continue
            assert exact <= epsilon <= exact + 2e-4
            compared += 1
    assert compared > clients


def test_the_direction_that_is_left_out_is_the_smaller_one(monkeypatch: Any) -> None:
    compositions = [*federation(20, seed=2), {SampledGaussian(0.95, 1.5): 20}]
    ours = pld_epsilons(compositions, 1e-5)
    monkeypatch.setattr(fleet_pld, "_add_is_smaller", lambda *_: False)
    np.testing.assert_array_equal(pld_epsilons(compositions, 1e-5), ours)


@given(
    rate=st.floats(1e-6, 1.0),
    noise=st.floats(0.02, 100.0),
    count=st.integers(1, 5000),
    delta=st.sampled_from([0.3, 1e-2, 1e-5, 1e-9, 1e-14]),
)
@settings(max_examples=10, deadline=None)
def test_pld_whatever_the_mechanism(rate: float, noise: float, count: int, delta: float) -> None:
    steps_: dict[Any, int] = {SampledGaussian(rate, noise): count}
    expected = pld_epsilon(steps_, delta)
    ours = pld_epsilons([steps_], delta)[0]
    assert ours == pytest.approx(expected, abs=3e-4, rel=1e-5)


def test_extreme_mechanisms_are_left_to_the_single_accountant() -> None:
    for kind in (
        SampledGaussian(0.5, 1e-3),
        SampledGaussian(1e-12, 1.0),
        SampledGaussian(0.1, 1e8),
    ):
        steps_: dict[Any, int] = {kind: 100}
        assert pld_epsilons([steps_], 1e-5)[0] == pld_epsilon(steps_, 1e-5)


@pytest.mark.skipif(bool(np.finfo(np.longdouble).eps > 1e-18), reason="no extended precision here")
@pytest.mark.parametrize("exponent", [3, 200, 10_000])
def test_guarantee_the_rounding_of_a_power_is_within_its_bound(exponent: int) -> None:
    size = fft_size(30_000)
    x = np.arange(size) - size / 2
    pmf = np.exp(-np.abs(x) / 3.0) + 1e-4 * np.exp(-0.5 * ((x - 40.0) / 9.0) ** 2)
    pmf /= pmf.sum()
    rough, bound = circular(power(np.fft.rfft(pmf), exponent), size, exponent)
    precise = np.fft.irfft(np.fft.rfft(pmf.astype(np.longdouble)) ** exponent, size)
    assert 0 < np.abs(rough - precise).sum() < bound


def test_names_numbers_and_order_of_clients() -> None:
    fleet = FleetAccountant().compose("b", STEP).compose(3, STEP, 0).compose("a", STEP, 2)
    assert fleet.clients == ("b", 3, "a")
    epsilons = fleet.get_epsilon(1e-5)
    assert tuple(epsilons) == fleet.clients
    assert epsilons[3] == 0.0
    assert epsilons["b"] < epsilons["a"]
    assert FleetAccountant().get_epsilon(1e-5) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "event", 1), "event must be a privacy event"),
        (("a", STEP, -1), "count must be a whole number"),
        (("a", STEP, 0.5), "count must be a whole number"),
        ((True, STEP, 1), "client must be a str or an int"),
        ((1.5, STEP, 1), "client must be a str or an int"),
        (("a", PoissonSampled(0.5, STEP), 1), "no accounting rule"),
    ],
)
def test_refused_releases_change_nothing(arguments: Any, message: str) -> None:
    fleet = FleetAccountant().compose("b", Gaussian(2.0))
    before = fleet.get_epsilon(1e-5)
    with pytest.raises(ValueError, match=message):
        fleet.compose(*arguments)
    assert fleet.get_epsilon(1e-5) == before


def test_unknown_names_and_deltas_are_refused() -> None:
    bad: Any = "gdp"
    with pytest.raises(ValueError, match="accountant must be one of"):
        FleetAccountant(bad)
    with pytest.raises(ValueError, match="adjacency must be one of"):
        FleetAccountant(adjacency=bad)
    with pytest.raises(ValueError, match="delta must"):
        FleetAccountant().get_epsilon(0.0)


@pytest.mark.parametrize("name", ["rdp", "pld", "moments"])
def test_clients_may_have_deltas_of_their_own(name: Any) -> None:
    fleet = FleetAccountant(name).compose("a", STEP, 5).compose("b", STEP, 9).compose("c", STEP)
    found = fleet.get_epsilon({"b": 1e-5, "a": 1e-3, "new": 1e-4})
    assert list(found) == ["b", "a", "new"]
    assert found["a"] == fleet.get_epsilon(1e-3)["a"]
    assert found["b"] == fleet.get_epsilon(1e-5)["b"]
    assert found["new"] == 0.0
    assert fleet.clients == ("a", "b", "c")
    with pytest.raises(ValueError, match="delta must"):
        fleet.get_epsilon({"a": 1e-3, "b": 0.0})


@pytest.mark.parametrize("name", ["rdp", "pld", "moments"])
def test_the_own_accountant_is_a_single_one_to_the_bit(name: Any) -> None:
    counts = {Gaussian(5.0): 2, STEP: 5}
    own = FleetAccountant(name).own_epsilon_of(counts, 1e-5)
    assert own == single(name, [(STEP, 5), (Gaussian(5.0), 2)], 1e-5)
    assert FleetAccountant(name).own_epsilon_of({}, 1e-5) == 0.0


def test_a_client_that_composed_nothing_new_is_not_computed_again(monkeypatch: Any) -> None:
    asked: list[int] = []

    def watched(compositions: Any, *arguments: Any) -> Any:
        asked.append(len(compositions))
        return pld_epsilons(compositions, *arguments)

    monkeypatch.setattr("fedsim.accountant.fleet.pld_epsilons", watched)
    fleet = FleetAccountant("pld").compose("a", STEP, 5).compose("b", STEP, 9)
    first = fleet.get_epsilon(1e-5)
    assert fleet.compose("b", STEP).get_epsilon(1e-5)["a"] == first["a"]
    assert fleet.get_epsilon(1e-5)["b"] > first["b"]
    assert asked == [2, 1]

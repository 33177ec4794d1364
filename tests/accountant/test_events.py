"""Events are values: coerced, checked, hashable, and JSON there and back."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import (
    SCHEMA_VERSION,
    ZCDP,
    Composed,
    EpochShuffled,
    EpsilonDelta,
    Event,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    NonPrivate,
    PoissonSampled,
    RandomAllocation,
    RepeatAndSelect,
    SelfComposed,
    event_from_dict,
    to_dict,
)

noises = st.floats(0.0, 1e6)
counts = st.integers(1, 10**6)
events = st.recursive(
    st.one_of(
        noises.map(Gaussian),
        st.lists(noises, min_size=1, max_size=3).map(lambda zs: JointGaussian(tuple(zs))),
        st.builds(ZCDP, noises),
        st.builds(EpsilonDelta, noises, st.floats(0.0, 1.0)),
        st.just(NonPrivate()),
    ),
    lambda inner: st.one_of(
        st.builds(PoissonSampled, st.floats(0.0, 1.0), inner),
        st.builds(lambda n, m, e: FixedSizeSampled(max(n, m), min(n, m), e), counts, counts, inner),
        st.builds(EpochShuffled, counts, inner),
        st.builds(RandomAllocation, counts, inner),
        st.builds(RepeatAndSelect, inner, st.floats(1.0, 1e6), st.none() | st.floats(0.0, 1e3)),
        st.builds(SelfComposed, inner, st.integers(0, 10**6)),
        st.lists(inner, max_size=3).map(lambda parts: Composed(tuple(parts))),
    ),
    max_leaves=6,
)


@given(events)
@settings(max_examples=60, deadline=None)
def test_json_round_trip_is_exact(event: Event) -> None:
    assert event_from_dict(json.loads(json.dumps(to_dict(event)))) == event
    assert hash(event_from_dict(to_dict(event))) == hash(event)


def test_json_form_never_changes() -> None:
    gaussian = {"type": "Gaussian", "noise_multiplier": 1.0}
    assert SCHEMA_VERSION == 1
    for event, record in (
        (
            PoissonSampled(0.25, Gaussian(1)),
            {"type": "PoissonSampled", "sampling_rate": 0.25, "event": gaussian},
        ),
        (SelfComposed(Gaussian(1), 3), {"type": "SelfComposed", "event": gaussian, "count": 3}),
        (
            Composed((Gaussian(1), NonPrivate())),
            {"type": "Composed", "events": [gaussian, {"type": "NonPrivate"}]},
        ),
        (JointGaussian((1, 2.5)), {"type": "JointGaussian", "noise_multipliers": [1.0, 2.5]}),
        (
            FixedSizeSampled(100, 10, Gaussian(1)),
            {"type": "FixedSizeSampled", "population": 100, "batch": 10, "event": gaussian},
        ),
        (
            EpochShuffled(10, Gaussian(1)),
            {"type": "EpochShuffled", "batches": 10, "event": gaussian},
        ),
        (
            RandomAllocation(10, Gaussian(1)),
            {"type": "RandomAllocation", "batches": 10, "event": gaussian},
        ),
        (ZCDP(0.5), {"type": "ZCDP", "rho": 0.5}),
        (EpsilonDelta(1, 0), {"type": "EpsilonDelta", "epsilon": 1.0, "delta": 0.0}),
        (
            RepeatAndSelect(Gaussian(1), 10, 0),
            {"type": "RepeatAndSelect", "event": gaussian, "mean": 10.0, "shape": 0.0},
        ),
        (
            RepeatAndSelect(Gaussian(1), 10, math.inf),
            {"type": "RepeatAndSelect", "event": gaussian, "mean": 10.0, "shape": None},
        ),
    ):
        assert to_dict(event) == record
        assert event_from_dict(record) == event


def test_a_joint_gaussian_knows_the_one_gaussian_it_is() -> None:
    assert JointGaussian((1.7,)).noise_multiplier == 1.7
    assert JointGaussian((2.0,) * 4).noise_multiplier == 1.0
    assert JointGaussian((3.0, 4.0)).noise_multiplier == pytest.approx(2.4, rel=1e-15)
    assert JointGaussian((1e-200, 1e200)).noise_multiplier == 1e-200
    assert JointGaussian((1.0, 0.0)).noise_multiplier == 0.0
    assert JointGaussian(as_given(np.array([1, 2]))) == JointGaussian((1.0, 2.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: JointGaussian(()), "noise_multipliers must have at least one element"),
        (
            lambda: JointGaussian((1.0, -2.0)),
            r"noise_multipliers\[1\] must be finite and >= 0, got -2",
        ),
        (lambda: JointGaussian((math.nan,)), r"noise_multipliers\[0\] must be a number, got NaN"),
        (lambda: JointGaussian(as_given(1.0)), "noise_multipliers must be a sequence of numbers"),
        (lambda: JointGaussian(as_given("12")), "noise_multipliers must be a sequence of numbers"),
        (
            lambda: FixedSizeSampled(10, 11, Gaussian(1)),
            "batch must be at most population=10, got 11",
        ),
        (
            lambda: FixedSizeSampled(0, 1, Gaussian(1)),
            "population must be a whole number >= 1, got 0",
        ),
        (lambda: FixedSizeSampled(10, 0, Gaussian(1)), "batch must be a whole number >= 1, got 0"),
        (lambda: FixedSizeSampled(10, as_given(2.5), Gaussian(1)), "batch must be a whole number"),
        (lambda: FixedSizeSampled(10, 2, as_given(1.0)), "event must be a privacy event"),
        (lambda: EpochShuffled(0, Gaussian(1)), "batches must be a whole number >= 1, got 0"),
        (lambda: RandomAllocation(as_given(math.nan), Gaussian(1)), "batches must be a number"),
        (lambda: ZCDP(-1.0), r"rho must be finite and >= 0, got -1\.0"),
        (lambda: EpsilonDelta(math.inf, 0.0), "epsilon must be finite and >= 0, got inf"),
        (lambda: EpsilonDelta(1.0, 1.5), r"delta must be between 0 and 1, got 1\.5"),
        (lambda: RepeatAndSelect(Gaussian(1), 0.5, 1), r"mean must be finite and >= 1, got 0\.5"),
        (lambda: RepeatAndSelect(Gaussian(1), 2, -0.5), r"shape must be >= 0, .* got -0\.5"),
        (lambda: RepeatAndSelect(Gaussian(1), 2, math.nan), "shape must be a number, got NaN"),
    ],
)
def test_the_other_events_refuse_bad_values(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def as_given(value: Any) -> Any:
    """The value as callers without type checking pass it."""
    return value


def test_numbers_of_every_type_make_the_same_event() -> None:
    for two in (2, np.float32(2), np.int64(2), np.array(2.0)):
        assert Gaussian(as_given(two)) == Gaussian(2.0)
    assert type(Gaussian(2).noise_multiplier) is float
    assert type(PoissonSampled(as_given(np.float32(0.5)), Gaussian(1)).sampling_rate) is float
    assert type(SelfComposed(Gaussian(1.0), as_given(np.int64(3))).count) is int
    assert SelfComposed(Gaussian(1.0), as_given(3.0)).count == 3
    assert str(Gaussian(-0.0).noise_multiplier) == "0.0"


@pytest.mark.parametrize(
    ("name", "build", "values"),
    [
        ("noise_multiplier", Gaussian, [-1e-9, math.inf, -math.inf, math.nan, "1", None, True]),
        (
            "sampling_rate",
            lambda value: PoissonSampled(value, Gaussian(1.0)),
            [-1e-9, 1.0000001, math.nan, math.inf, "0.5", None],
        ),
        (
            "count",
            lambda value: SelfComposed(Gaussian(1.0), value),
            [-1, 1.5, math.nan, math.inf, "2", None],
        ),
    ],
)
def test_bad_numbers_are_refused(name: str, build: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            build(value)


def test_parts_must_be_events() -> None:
    bad: Any = 1.0
    with pytest.raises(ValueError, match="event must be a privacy event"):
        PoissonSampled(0.5, bad)
    with pytest.raises(ValueError, match=r"events\[1\] must be a privacy event"):
        Composed((Gaussian(1.0), bad))
    lone: Any = Gaussian(1.0)
    with pytest.raises(ValueError, match="sequence of events"):
        Composed(lone)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"type": "Laplace"}, "event type must be one of .* got 'Laplace'"),
        ({}, "event type must be one of .* got None"),
        ({"type": ["Gaussian"]}, "event type must be one of"),
        ([1], "event must be an object"),
        ({"type": "Gaussian"}, r"Gaussian must have the keys \['noise_multiplier'\], got \[\]"),
        ({"type": "Gaussian", "noise_multiplier": 1, "q": 1}, "must have the keys"),
        ({"type": "NonPrivate", "note": 1}, "must have the keys"),
        ({"type": "Gaussian", "noise_multiplier": -1}, "noise_multiplier must be"),
        ({"type": "Gaussian", "noise_multiplier": "1"}, "noise_multiplier must be"),
        ({"type": "PoissonSampled", "sampling_rate": 1, "event": 3}, "event must be an object"),
        ({"type": "Composed", "events": {"type": "NonPrivate"}}, "events must be a list"),
        ({"type": "JointGaussian", "noise_multipliers": 1.0}, "noise_multipliers must be a list"),
        ({"type": "ZCDP", "rho": None}, "rho must be a number, got None"),
    ],
)
def test_event_from_dict_refuses_what_it_does_not_know(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        event_from_dict(record)


def test_to_dict_refuses_an_unknown_event() -> None:
    with pytest.raises(ValueError, match="event must be one of"):
        to_dict(Event())

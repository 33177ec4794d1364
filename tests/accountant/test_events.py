"""Events are values: coerced, checked, hashable, and JSON there and back."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.accountant import (
    Composed,
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    SelfComposed,
    event_from_dict,
    to_dict,
)

noises = st.floats(0.0, 1e6)
events = st.recursive(
    st.one_of(noises.map(Gaussian), st.just(NonPrivate())),
    lambda inner: st.one_of(
        st.builds(PoissonSampled, st.floats(0.0, 1.0), inner),
        st.builds(SelfComposed, inner, st.integers(0, 10**6)),
        st.lists(inner, max_size=3).map(lambda parts: Composed(tuple(parts))),
    ),
    max_leaves=6,
)


@given(events)
@settings(max_examples=150, deadline=None)
def test_json_round_trip_is_exact(event: Event) -> None:
    assert event_from_dict(json.loads(json.dumps(to_dict(event)))) == event
    assert hash(event_from_dict(to_dict(event))) == hash(event)


def test_json_form_is_the_contract() -> None:
    assert to_dict(PoissonSampled(0.25, Gaussian(1.5))) == {
        "type": "PoissonSampled",
        "sampling_rate": 0.25,
        "event": {"type": "Gaussian", "noise_multiplier": 1.5},
    }
    assert to_dict(SelfComposed(NonPrivate(), 3)) == {
        "type": "SelfComposed",
        "event": {"type": "NonPrivate"},
        "count": 3,
    }
    assert to_dict(Composed((Gaussian(1.0), NonPrivate()))) == {
        "type": "Composed",
        "events": [{"type": "Gaussian", "noise_multiplier": 1.0}, {"type": "NonPrivate"}],
    }


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


@pytest.mark.parametrize("value", [-1e-9, math.inf, -math.inf, math.nan, "1", None, True])
def test_gaussian_refuses_a_bad_noise_multiplier(value: Any) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        Gaussian(value)


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, math.nan, math.inf, "0.5", None])
def test_poisson_refuses_a_bad_rate(value: Any) -> None:
    with pytest.raises(ValueError, match="sampling_rate must be"):
        PoissonSampled(value, Gaussian(1.0))


@pytest.mark.parametrize("value", [-1, 1.5, math.nan, math.inf, "2", None])
def test_self_composed_refuses_a_bad_count(value: Any) -> None:
    with pytest.raises(ValueError, match="count must be"):
        SelfComposed(Gaussian(1.0), value)


def test_errors_name_the_value_and_the_rule() -> None:
    with pytest.raises(ValueError, match=r"sampling_rate must be between 0 and 1, got 1\.5"):
        PoissonSampled(1.5, Gaussian(1.0))
    with pytest.raises(ValueError, match=r"noise_multiplier must be finite and >= 0, got -2\.0"):
        Gaussian(-2)


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
    ],
)
def test_event_from_dict_refuses_what_it_does_not_know(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        event_from_dict(record)


def test_to_dict_refuses_an_unknown_event() -> None:
    with pytest.raises(ValueError, match="event must be one of"):
        to_dict(Event())

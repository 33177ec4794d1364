"""Privacy events: what was released, said without any mathematics.

An event is an immutable, hashable value. Accountants turn events into epsilon; ledgers store
them. The meaning of an event never changes: a new mechanism is a new class.

The noise multiplier z is the noise's standard deviation over the L2 sensitivity under zero-out
or add-remove adjacency, that is over the clipping norm C of one example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedsim.accountant import checks


@dataclass(frozen=True)
class Event:
    """Base of all events: immutable values whose fields are numbers or other events."""


@dataclass(frozen=True)
class Gaussian(Event):
    """One release of a sum plus N(0, (z C)^2) per coordinate, C the L2 sensitivity of the sum.

    Attributes:
        noise_multiplier: z >= 0, finite. 0 is a release without noise: its epsilon is infinite.

    Raises:
        ValueError: `noise_multiplier` is negative, infinite or NaN.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _store(self, "noise_multiplier", checks.non_negative)


@dataclass(frozen=True)
class PoissonSampled(Event):
    """`event` applied to a sample that each example joins independently with one probability.

    Attributes:
        sampling_rate: q in [0, 1], the inclusion probability of every example.
        event: what is released about the sample.

    Raises:
        ValueError: `sampling_rate` is outside [0, 1] or NaN, or `event` is not an event.
    """

    sampling_rate: float
    event: Event

    def __post_init__(self) -> None:
        _store(self, "sampling_rate", checks.probability)
        _require_event("event", self.event)


@dataclass(frozen=True)
class SelfComposed(Event):
    """`event` released `count` times, with fresh randomness each time.

    Attributes:
        event: the event that is repeated.
        count: number of releases, a whole number >= 0.

    Raises:
        ValueError: `count` is negative or not whole, or `event` is not an event.
    """

    event: Event
    count: int

    def __post_init__(self) -> None:
        _require_event("event", self.event)
        _store(self, "count", checks.whole_number)


@dataclass(frozen=True)
class Composed(Event):
    """All of `events` released, each with its own randomness; later ones may look at earlier ones.

    Attributes:
        events: the events, in order; kept as a tuple. An empty one releases nothing.

    Raises:
        ValueError: an element is not an event.
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if isinstance(self.events, (Event, str)):
            raise ValueError(f"events must be a sequence of events, got {self.events!r}")
        object.__setattr__(self, "events", tuple(self.events))
        for position, event in enumerate(self.events):
            _require_event(f"events[{position}]", event)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any guarantee: epsilon is infinite from here on."""


_EVENT_TYPES: dict[str, type[Event]] = {
    cls.__name__: cls for cls in (Gaussian, PoissonSampled, SelfComposed, Composed, NonPrivate)
}


def to_dict(event: Event) -> dict[str, Any]:
    """Returns the event in the JSON form of the ledger, e.g. `{"type": "Gaussian", ...}`.

    Edge cases: values come out as stored; `event_from_dict(to_dict(e)) == e`, also through JSON
    text, because Python prints floats so that they read back exactly.

    Raises:
        ValueError: `event` is not one of this module's events.
    """
    if _EVENT_TYPES.get(type(event).__name__) is not type(event):
        raise ValueError(f"event must be one of {sorted(_EVENT_TYPES)}, got {event!r}")
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"type": type(event).__name__} | {name: _plain(v) for name, v in values.items()}


def event_from_dict(record: Mapping[str, Any]) -> Event:
    """Returns the event that `to_dict` wrote.

    Raises:
        ValueError: the type is unknown, a key is missing or unknown, or a value breaks the
            event's own rule.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"event must be an object with a 'type', got {record!r}")
    name = record.get("type")
    cls = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"event type must be one of {sorted(_EVENT_TYPES)}, got {name!r}")
    wanted = {field.name for field in fields(cls)}
    given = set(record) - {"type"}
    if wanted != given:
        raise ValueError(
            f"{name} must have the keys {sorted(wanted)}, got {sorted(map(str, given))}"
        )
    return cls(**{key: _event_value(key, record[key]) for key in wanted})


def append_run(runs: list[tuple[Event, int]], event: Event, count: int) -> None:
    """Appends `count` times `event` to a run-length list; equal neighbours become one run."""
    if count == 0:
        return
    if runs and runs[-1][0] == event:
        runs[-1] = (event, runs[-1][1] + count)
    else:
        runs.append((event, count))


def _store(event: Event, name: str, check: Callable[[str, Any], float]) -> None:
    # Frozen dataclasses forbid assignment; this is the documented way round it at construction.
    object.__setattr__(event, name, check(name, getattr(event, name)))


def _require_event(name: str, value: object) -> None:
    if not isinstance(value, Event):
        raise ValueError(f"{name} must be a privacy event such as Gaussian(1.0), got {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, Event):
        return to_dict(value)
    return [to_dict(event) for event in value] if isinstance(value, tuple) else value


def _event_value(key: str, value: Any) -> Any:
    if key == "event":
        return event_from_dict(value)
    if key == "events":
        if not isinstance(value, list):
            raise ValueError(f"events must be a list, got {value!r}")
        return tuple(event_from_dict(item) for item in value)
    return value

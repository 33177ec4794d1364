"""Privacy events, which describe what is released, and the adjacency of a guarantee.

An event is an immutable, hashable value. Accountants turn events into epsilon; ledgers store
them. The meaning of an event never changes: a new mechanism is a new class.

The noise multiplier z is the noise's standard deviation over the clipping norm C of one example,
for every adjacency: an accountant for replace-one adjacency, where the sum moves by up to 2 C,
halves z itself.

An adjacency says which pairs of data sets a guarantee makes indistinguishable. With per-example
gradients clipped to norm C:

- "zero_out" (the default): one example's contribution is set to zero; the number of examples is
  public. The sum moves by at most C.
- "add_remove": one example is added or removed; the number of examples is private, so nothing
  public (sampling rate, number of steps, normaliser, weight) may be computed from it. The sum moves
  by at most C.
- "replace_one": one example becomes another; the number of examples is public. The sum
  moves by up to 2 C, so noise z C is only z / 2 times the sensitivity and epsilon roughly doubles.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, SupportsFloat, get_args

from fedsim.accountant import checks

SCHEMA_VERSION = 1  # of the JSON form; raised when a reader of the old form would misread a record


@dataclass(frozen=True)
class Event:
    """Base class of all events, which are immutable values made of numbers and other events.

    Fields with the same name have the same range of values in all events.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _CHECKS[field.name](field.name, getattr(self, field.name))
            # Frozen dataclasses forbid assignment; this is the documented way round it.
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True)
class Gaussian(Event):
    """A release of a sum plus Gaussian noise N(0, (z C)^2) per coordinate.

    C is the clipping norm of one example.

    Attributes:
        noise_multiplier: z >= 0, finite. A release with z = 0 has no noise and infinite epsilon.

    Raises:
        ValueError: `noise_multiplier` is negative, infinite or NaN.

    Example:
        >>> from fedsim.accountant import Gaussian, PldAccountant
        >>> round(PldAccountant().compose(Gaussian(2.0)).get_epsilon(1e-5), 3)
        1.993
    """

    noise_multiplier: float


@dataclass(frozen=True)
class JointGaussian(Event):
    """Several Gaussian releases about the same examples, which count as ONE Gaussian release.

    Group m (a group of parameters, or the bits of adaptive clipping) has clipping norm C_m and
    noise of standard deviation z_m C_m per coordinate. Scaled by 1 / (z_m C_m), the groups are one
    vector with unit noise. Its sensitivity is the root of the sum of z_m^-2 (McMahan et al. 2018,
    arXiv:1812.06210, section 3). Inside a sampling event all groups share the sample.

    Attributes:
        noise_multipliers: z_m >= 0 of each group; at least one group; kept as a tuple.

    Raises:
        ValueError: `noise_multipliers` is empty, or a value is negative, infinite or NaN.

    Example:
        >>> from fedsim.accountant import JointGaussian
        >>> round(JointGaussian((3.0, 4.0)).noise_multiplier, 3)  # 1 / √(1/9 + 1/16)
        2.4
    """

    noise_multipliers: tuple[float, ...]

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of all groups together, (sum of z_m^-2)^(-1/2)."""
        least = min(self.noise_multipliers)  # taken out of the sum: no square over- or underflows
        if least == 0.0:
            return 0.0
        return least / math.sqrt(math.fsum((least / z) ** 2 for z in self.noise_multipliers))


@dataclass(frozen=True)
class PoissonSampled(Event):
    """A release about a Poisson sample, which each example joins independently with probability q.

    Attributes:
        sampling_rate: q in [0, 1], the inclusion probability of every example.
        event: the release about the sample.

    Raises:
        ValueError: `sampling_rate` is outside [0, 1] or NaN, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
        >>> step = PoissonSampled(0.01, Gaussian(1.0))
        >>> round(PldAccountant().compose(step, 1000).get_epsilon(1e-5), 3)
        1.828
    """

    sampling_rate: float
    event: Event


@dataclass(frozen=True)
class FixedSizeSampled(Event):
    """A release about a uniformly random subset of fixed size, drawn without replacement.

    If one example is missing, another takes its place in the subset. So the guarantee differs from
    that of Poisson sampling and holds under replace-one adjacency.

    Attributes:
        population: number of examples in the data set, N >= 1, public.
        batch: number of examples in the subset, between 1 and `population`.
        event: the release about the subset.

    Raises:
        ValueError: a number is not whole or out of its range, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import FixedSizeSampled, Gaussian, RdpAccountant
        >>> step = FixedSizeSampled(population=1000, batch=10, event=Gaussian(2.0))
        >>> accountant = RdpAccountant(adjacency="replace_one").compose(step, 100)
        >>> round(accountant.get_epsilon(1e-5), 3)
        1.254
    """

    population: int
    batch: int
    event: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch > self.population:
            raise ValueError(
                f"batch must be at most population={self.population!r}, got {self.batch!r}"
            )


@dataclass(frozen=True)
class EpochShuffled(Event):
    """One pass over shuffled data cut into disjoint batches, with a release about each batch.

    Record it once per pass (epoch), or once per shuffle if only a part of the pass was run. Every
    example is in at most one batch, so the pass costs as much as ONE release about a known batch,
    for any number of batches. No amplification by sampling is claimed, because batches of one
    shuffle depend on each other (Chua et al. 2024, arXiv:2403.17673).

    Attributes:
        batches: number of disjoint batches of the pass, >= 1; does not change epsilon.
        event: the release about each batch.

    Raises:
        ValueError: `batches` is not a whole number >= 1, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import EpochShuffled, Gaussian, PldAccountant
        >>> epoch = EpochShuffled(batches=10, event=Gaussian(2.0))
        >>> round(PldAccountant().compose(epoch, 5).get_epsilon(1e-5), 3)
        4.983
    """

    batches: int
    event: Event


@dataclass(frozen=True)
class RandomAllocation(Event):
    """One pass in which each example joins one of the batches, at random and independently.

    This is also known as balls-and-bins sampling (Chua et al. 2024, arXiv:2412.16802). Batch sizes
    are random, and `event` is released about each batch, even an empty one. Record it once per
    pass, even if only some batches of the pass were released. Each pass needs a fresh allocation.

    Attributes:
        batches: number of batches of the pass, >= 1, public and chosen without looking at the data.
        event: the release about each batch.

    Raises:
        ValueError: `batches` is not a whole number >= 1, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import Gaussian, RandomAllocation, RdpAccountant
        >>> epoch = RandomAllocation(batches=10, event=Gaussian(2.0))
        >>> round(RdpAccountant().compose(epoch, 5).get_epsilon(1e-5), 3)
        1.601
    """

    batches: int
    event: Event


@dataclass(frozen=True)
class ZCDP(Event):
    """A release that is rho-zero-concentrated DP (Bun, Steinke 2016, arXiv:1605.02065).

    This means (alpha, rho alpha)-RDP for every alpha > 1. The code that records the event must make
    sure that this holds under the adjacency of the accountant that composes the event.

    Attributes:
        rho: the zCDP parameter, >= 0, finite.

    Raises:
        ValueError: `rho` is negative, infinite or NaN.

    Example:
        >>> from fedsim.accountant import ZCDP, RdpAccountant
        >>> round(RdpAccountant().compose(ZCDP(0.5)).get_epsilon(1e-5), 3)
        4.729
    """

    rho: float


@dataclass(frozen=True)
class EpsilonDelta(Event):
    """A release known to be (epsilon, delta)-DP, and nothing more.

    The code that records the event must make sure that this holds under the adjacency of the
    accountant that composes the event.

    Attributes:
        epsilon: the epsilon of the release, >= 0, finite.
        delta: the delta of the release, in [0, 1].

    Raises:
        ValueError: a value is outside its range or NaN.

    Example:
        >>> from fedsim.accountant import EpsilonDelta, PldAccountant
        >>> round(PldAccountant().compose(EpsilonDelta(0.5, 1e-7), 2).get_epsilon(1e-5), 3)
        1.0
    """

    epsilon: float
    delta: float


@dataclass(frozen=True)
class RepeatAndSelect(Event):
    """A release of the best result of a random number of runs of `event` on the same data.

    It is used to account for hyper-parameter tuning (Papernot, Steinke 2022, arXiv:2110.03620). The
    number of runs must be drawn from the stated distribution and kept secret. If the result of
    every run is released, use `SelfComposed` instead.

    Attributes:
        event: the release of one run.
        mean: expected number of runs, >= 1.
        shape: parameter eta >= 0 of the truncated negative binomial distribution of the number of
            runs: 1 is the geometric, 0 the logarithmic one. None or infinity stands for the Poisson
            distribution.

    Raises:
        ValueError: a value is outside its range or NaN, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import Gaussian, RdpAccountant, RepeatAndSelect
        >>> tuned = RepeatAndSelect(event=Gaussian(5.0), mean=10.0, shape=1.0)
        >>> round(RdpAccountant().compose(tuned).get_epsilon(1e-5), 3)
        1.718
    """

    event: Event
    mean: float
    shape: float | None


@dataclass(frozen=True)
class SelfComposed(Event):
    """A release of `event`, made `count` times with fresh randomness each time.

    Attributes:
        event: the event that is repeated.
        count: number of releases, a whole number >= 0.

    Raises:
        ValueError: `count` is negative or not whole, or `event` is not an event.

    Example:
        >>> from fedsim.accountant import Gaussian, PldAccountant, SelfComposed
        >>> round(PldAccountant().compose(SelfComposed(Gaussian(9.0), 10)).get_epsilon(1e-5), 3)
        1.347
    """

    event: Event
    count: int


@dataclass(frozen=True)
class Composed(Event):
    """A sequence of releases with independent randomness; later events may use earlier results.

    Attributes:
        events: the events in order, kept as a tuple. An empty tuple releases nothing.

    Raises:
        ValueError: an element is not an event.

    Example:
        >>> from fedsim.accountant import Composed, Gaussian, PldAccountant
        >>> both = Composed((Gaussian(3.0), Gaussian(4.0)))
        >>> round(PldAccountant().compose(both).get_epsilon(1e-5), 3)
        1.627
    """

    events: tuple[Event, ...]


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any guarantee, which makes epsilon infinite.

    Example:
        >>> from fedsim.accountant import NonPrivate, PldAccountant
        >>> PldAccountant().compose(NonPrivate()).get_epsilon(1e-5)
        inf
    """


_EVENT_TYPES: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        Gaussian,
        JointGaussian,
        PoissonSampled,
        FixedSizeSampled,
        EpochShuffled,
        RandomAllocation,
        ZCDP,
        EpsilonDelta,
        RepeatAndSelect,
        SelfComposed,
        Composed,
        NonPrivate,
    )
}


def to_dict(event: Event) -> dict[str, Any]:
    """Return an event as the JSON object that ledgers store, e.g. `{"type": "Gaussian", ...}`.

    All values stay exact: `event_from_dict(to_dict(e)) == e`, also if the object is written as JSON
    text and read again.

    Raises:
        ValueError: `event` is not one of this module's events.

    Example:
        >>> from fedsim.accountant import Gaussian, to_dict
        >>> to_dict(Gaussian(1.5))
        {'type': 'Gaussian', 'noise_multiplier': 1.5}
    """
    if _EVENT_TYPES.get(type(event).__name__) is not type(event):
        raise ValueError(f"event must be one of {sorted(_EVENT_TYPES)}, got {event!r}")
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"type": type(event).__name__} | {name: _plain(v) for name, v in values.items()}


def event_from_dict(record: Mapping[str, Any]) -> Event:
    """Return the event of a record that `to_dict` returned.

    Raises:
        ValueError: the type is unknown, a key is missing or unknown, or a value is outside the
            range that the event's class allows.

    Example:
        >>> from fedsim.accountant import event_from_dict
        >>> event_from_dict({"type": "Gaussian", "noise_multiplier": 1.5})
        Gaussian(noise_multiplier=1.5)
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


def append_event(runs: list[tuple[Event, int]], event: Event, count: int) -> None:
    """Append `count` releases of `event` to a run-length list in place.

    If the last pair of the list has an equal event, the count of that pair is increased instead.

    Args:
        runs: pairs (event, number of releases), in order.
        event: one release.
        count: number of releases, >= 0; 0 appends nothing.
    """
    if count == 0:
        return
    if runs and runs[-1][0] == event:
        runs[-1] = (event, runs[-1][1] + count)
    else:
        runs.append((event, count))


def _shape(name: str, value: SupportsFloat | None) -> float | None:
    if value is None:
        return None
    number = checks.real_number(name, value)
    if number < 0.0:
        raise ValueError(f"{name} must be >= 0, or None for Poisson, got {number!r}")
    return None if math.isinf(number) else number + 0.0


def _noises(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a sequence of numbers, got {value!r}")
    noises = tuple(checks.non_negative(f"{name}[{m}]", noise) for m, noise in enumerate(value))
    if not noises:
        raise ValueError(f"{name} must have at least one element, got none")
    return noises


def _event(name: str, value: object) -> Event:
    if not isinstance(value, Event):
        raise ValueError(f"{name} must be a privacy event such as Gaussian(1.0), got {value!r}")
    return value


def _events(name: str, value: Any) -> tuple[Event, ...]:
    if isinstance(value, (Event, str)):
        raise ValueError(f"{name} must be a sequence of events, got {value!r}")
    return tuple(_event(f"{name}[{position}]", event) for position, event in enumerate(value))


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "noise_multiplier": checks.non_negative,
    "noise_multipliers": _noises,
    "sampling_rate": checks.probability,
    "population": checks.positive_whole_number,
    "batch": checks.positive_whole_number,
    "batches": checks.positive_whole_number,
    "rho": checks.non_negative,
    "epsilon": checks.non_negative,
    "delta": checks.probability,
    "mean": checks.at_least_one,
    "shape": _shape,
    "count": checks.whole_number,
    "event": _event,
    "events": _events,
}
"""Check of each event field, by the field's name.

A check takes the name and a value. It returns the value to store, or raises ValueError.
"""


def _plain(value: Any) -> Any:
    if isinstance(value, Event):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _event_value(key: str, value: Any) -> Any:
    if key == "event":
        return event_from_dict(value)
    if key in ("events", "noise_multipliers"):
        if not isinstance(value, list):
            raise ValueError(f"{key} must be a list, got {value!r}")
        return tuple(event_from_dict(item) for item in value) if key == "events" else tuple(value)
    return value


Adjacency = Literal["zero_out", "add_remove", "replace_one"]

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


def check_adjacency(value: str) -> Adjacency:
    """Return `value` if it is one of `ADJACENCIES`; otherwise raise ValueError."""
    if value not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {list(ADJACENCIES)}, got {value!r}")
    return value

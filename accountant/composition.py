"""Translation of privacy events into the mechanisms that accountants compose.

A mechanism is a release with a known dominating pair of distributions, or with a known RDP curve.
Which mechanisms an event consists of depends on the adjacency, and only this module decides it. An
event without a proven rule for the adjacency is refused.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

from fedsim.accountant.events import (
    ZCDP,
    Adjacency,
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
    check_adjacency,
)
from fedsim.core.errors import FedsimError


class UnsupportedEventError(FedsimError, ValueError):
    """Raised for an event, or an event inside it, whose privacy the accountant cannot bound."""


class SampledGaussian(NamedTuple):
    """A step: Poisson sampling at rate q, then a Gaussian release with noise multiplier z > 0.

    The dominating pair is (1-q) N(0, z^2) + q N(1, z^2) against N(0, z^2). Here z is the noise over
    the sensitivity, which is 2 C under replace-one adjacency (possible only for q = 1).

    q = 1 is the plain Gaussian mechanism; q = 0 never occurs here, as it releases nothing.
    """

    sampling_rate: float
    noise_multiplier: float


@dataclass(frozen=True)
class ReplacedGaussian:
    """A Poisson-sampled Gaussian step with sampling rate q < 1 under replace-one adjacency.

    The noise multiplier z > 0 is relative to the clipping norm C, not to the sensitivity 2 C. The
    dominating pair is (1-q) N(0, z^2) + q N(1, z^2) and (1-q) N(0, z^2) + q N(-1, z^2).
    """

    sampling_rate: float
    noise_multiplier: float


@dataclass(frozen=True)
class FixedSizeGaussian:
    """A Gaussian step on a share q < 1 of the examples, drawn without replacement.

    The mechanism is valid under replace-one adjacency. The noise multiplier z is relative to the
    clipping norm C of one example.
    """

    sampling_rate: float
    noise_multiplier: float


@dataclass(frozen=True)
class AllocatedGaussian:
    """One pass of balls-and-bins sampling over b > 1 batches, each with a Gaussian release.

    The mechanism is valid under zero-out and add-remove adjacency; the noise multiplier z is > 0.
    """

    batches: int
    noise_multiplier: float


@dataclass(frozen=True)
class Concentrated:
    """A release known only to be rho-zCDP, rho > 0."""

    rho: float


@dataclass(frozen=True)
class Approximate:
    """A release known only to be (epsilon, delta)-DP, delta < 1."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Selection:
    """A mechanism that runs a random number of times and releases only the best result.

    Attributes:
        steps: pairs (mechanism, number of times that one run uses it).
        mean: expected number of runs, >= 1.
        shape: parameter eta of the truncated negative binomial distribution of the number of runs;
            None for the Poisson distribution.
    """

    steps: "tuple[tuple[Mechanism, int], ...]"
    mean: float
    shape: float | None


Mechanism = (
    SampledGaussian
    | ReplacedGaussian
    | FixedSizeGaussian
    | AllocatedGaussian
    | Concentrated
    | Approximate
    | Selection
)


def sort_steps(steps: Mapping[Mechanism, int]) -> tuple[tuple[Mechanism, int], ...]:
    """Return sorted pairs (mechanism, number of runs), a cache key for steps in any order."""
    return tuple(sorted(steps.items(), key=_sort_key))


def _sort_key(item: tuple[Mechanism, int]) -> tuple[str, tuple[float, ...], str]:
    mechanism, count = item
    if isinstance(mechanism, SampledGaussian):
        return "", tuple(mechanism), ""
    if isinstance(mechanism, Selection):
        return "Selection", (count,), repr(mechanism)
    return type(mechanism).__name__, astuple(mechanism), ""


def break_down(event: Event, count: int = 1, adjacency: Adjacency = "zero_out") -> "Breakdown":
    """Return the mechanisms of which `count` releases of `event` consist, for accounting.

    Several Gaussians with noise multipliers z_i about the same sample are one Gaussian with
    z = (sum of z_i^-2)^(-1/2) (McMahan et al. 2018, arXiv:1812.06210, section 3). Counting them as
    separately sampled steps would under-report epsilon.

    Args:
        event: one release.
        count: number of releases, a whole number >= 0.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        UnsupportedEventError: `event`, or an event inside it, has no rule under this adjacency; the
            message names it.
        ValueError: there is no such adjacency.
    """
    breakdown = Breakdown(check_adjacency(adjacency))
    breakdown.add(event, count)
    return breakdown


def zcdp_rho(charges: Iterable[tuple[Event, int]], adjacency: Adjacency = "zero_out") -> float:
    """Return ρ of zCDP of releases together; ∞ if one is sampled or is not known to be zCDP.

    A Gaussian release with noise multiplier z has ρ = 1 / (2 z²), and ρ of several releases adds up
    (Bun, Steinke 2016, arXiv:1605.02065, propositions 1.6 and 1.7). Sampling lowers ε, and never ρ:
    at large Rényi orders, a sampled release costs as much as one without sampling.

    Args:
        charges: (event, number of releases) pairs.
        adjacency: "zero_out", "add_remove" or "replace_one".

    Raises:
        UnsupportedEventError: an event has no rule under this adjacency.

    Example:
        >>> from fedsim.accountant import Gaussian, zcdp_rho
        >>> zcdp_rho([(Gaussian(2.0), 4)])
        0.5
    """
    rho = 0.0
    for event, count in charges:
        parts = break_down(event, count, adjacency)
        for mechanism, times in parts.steps.items():
            match mechanism:
                case SampledGaussian(sampling_rate=1.0):
                    rho += times * 0.5 * (1.0 / mechanism.noise_multiplier) ** 2
                case Concentrated():
                    rho += times * mechanism.rho
                case _:
                    return math.inf
        if parts.non_private:
            return math.inf
    return rho


_SampledEvent = PoissonSampled | FixedSizeSampled | EpochShuffled | RandomAllocation


@dataclass
class Breakdown:
    """The mechanisms into which events were broken down for accounting.

    Attributes:
        adjacency: the neighbouring data sets.
        steps: number of runs of each mechanism.
        non_private: whether something was released without any guarantee.
    """

    adjacency: Adjacency
    steps: Counter[Mechanism] = field(default_factory=Counter)
    non_private: bool = False

    def add(self, event: Event, count: int) -> None:
        """Add `count` releases of `event`; raise UnsupportedEventError if it has no rule.

        The whole event is walked even if a count is 0: an event is supported or it is not.
        """
        match event:
            case Gaussian() | JointGaussian():
                self._add_gaussian(event.noise_multiplier, count)
            case NonPrivate():
                self.non_private |= count > 0
            case SelfComposed():
                self.add(event.event, count * event.count)
            case Composed():
                for part in event.events:
                    self.add(part, count)
            case PoissonSampled():
                self._poisson(event, count)
            case FixedSizeSampled():
                self._fixed_size(event, count)
            case EpochShuffled():
                self._epoch(event, count)
            case RandomAllocation():
                self._allocation(event, count)
            case ZCDP():
                self._add(Concentrated(event.rho), count if event.rho > 0.0 else 0)
            case EpsilonDelta():
                self._epsilon_delta(event, count)
            case RepeatAndSelect():
                self._selection(event, count)
            case _:
                raise UnsupportedEventError(f"no accounting rule for {event!r}")

    def _sampled(
        self, event: _SampledEvent, count: int, amplified: Callable[[float], Mechanism] | None
    ) -> None:
        """Add releases about samples; `amplified` makes the mechanism of z, None without gain."""
        noise = _noise_about_one_sample(event.event, event)
        if noise is None:
            return
        if amplified is None:
            self._add_gaussian(noise, count)
        elif noise == 0.0:
            self.non_private |= count > 0
        else:
            self._add(amplified(noise), count)

    def _poisson(self, event: PoissonSampled, count: int) -> None:
        rate = event.sampling_rate
        kind = ReplacedGaussian if self.adjacency == "replace_one" else SampledGaussian
        drawn = partial(kind, rate) if rate < 1.0 else None
        self._sampled(event, count if rate > 0.0 else 0, drawn)

    def _fixed_size(self, event: FixedSizeSampled, count: int) -> None:
        if self.adjacency == "add_remove":
            self._refuse(
                event,
                "a sample of fixed size tells the number of examples, private under add_remove",
                "use replace_one, or Poisson sampling",
            )
        if self.adjacency == "zero_out":
            self._refuse(
                event,
                "its guarantee is proved for replace_one (another example fills the place of the "
                "missing one, so the Poisson figure would be too low)",
                "use replace_one, whose guarantee includes zero_out, or Poisson sampling",
            )
        drawn = partial(FixedSizeGaussian, event.batch / event.population)
        self._sampled(event, count, drawn if event.batch < event.population else None)

    def _epoch(self, event: EpochShuffled, count: int) -> None:
        if self.adjacency == "add_remove":
            self._refuse(
                event,
                "one more example moves the others between the batches of a shuffle",
                "use zero_out or replace_one, or Poisson sampling or RandomAllocation",
            )
        # Given the shuffle and all that was released before, only the batch that holds the example
        # differs, by one Gaussian; the shuffle is independent of the data, and hockey-stick
        # divergences are jointly convex, so mixing over shuffles does not add to it.
        self._sampled(event, count, None)

    def _allocation(self, event: RandomAllocation, count: int) -> None:
        # Under replace-one as for a shuffle: the new example takes the batch of the old one.
        plain = self.adjacency == "replace_one" or event.batches == 1
        self._sampled(event, count, None if plain else partial(AllocatedGaussian, event.batches))

    def _epsilon_delta(self, event: EpsilonDelta, count: int) -> None:
        if event.delta == 1.0:
            self.non_private |= count > 0
        elif event.epsilon > 0.0 or event.delta > 0.0:
            self._add(Approximate(event.epsilon, event.delta), count)

    def _selection(self, event: RepeatAndSelect, count: int) -> None:
        inside = break_down(event.event, 1, self.adjacency)
        for mechanism in inside.steps:
            if isinstance(mechanism, Approximate) and mechanism.delta > 0.0:
                raise UnsupportedEventError(
                    f"no accounting rule for {mechanism!r} inside {event!r}: selection is "
                    "accounted for by Rényi DP, which delta > 0 does not have; use delta = 0"
                )
        self.non_private |= inside.non_private and count > 0
        if event.mean == 1.0 and event.shape is not None:  # always exactly one run
            for mechanism, times in inside.steps.items():
                self._add(mechanism, times * count)
        elif inside.steps:
            self._add(Selection(sort_steps(inside.steps), event.mean, event.shape), count)

    def _add_gaussian(self, noise: float, count: int) -> None:
        """Add `count` Gaussian steps without sampling; `noise` is z relative to C."""
        if self.adjacency == "replace_one":
            noise *= 0.5
        if noise == 0.0:
            self.non_private |= count > 0
        else:
            self._add(SampledGaussian(1.0, noise), count)

    def _add(self, mechanism: Mechanism, count: int) -> None:
        if count > 0:
            self.steps[mechanism] += count

    def _refuse(self, event: Event, reason: str, fix: str) -> NoReturn:
        raise UnsupportedEventError(
            f"{event!r} is not supported under {self.adjacency} adjacency: {reason}; {fix}"
        )


def _noise_about_one_sample(event: Event, whole: Event) -> float | None:
    """Return the joint z of all Gaussians in `event`; None if `event` releases nothing."""
    noises: Counter[float] = Counter()
    _collect_noises(event, 1, whole, noises)
    if not noises:
        return None
    return 0.0 if 0.0 in noises else joint_noise_multiplier(noises)


def _collect_noises(event: Event, count: int, whole: Event, into: Counter[float]) -> None:
    match event:
        case Gaussian() | JointGaussian():
            into.update({event.noise_multiplier: count} if count > 0 else {})
        case NonPrivate():
            into.update({0.0: count} if count > 0 else {})
        case SelfComposed():
            _collect_noises(event.event, count * event.count, whole, into)
        case Composed():
            for part in event.events:
                _collect_noises(part, count, whole, into)
        case _:
            raise UnsupportedEventError(f"no accounting rule for {event!r} inside {whole!r}")


def joint_noise_multiplier(steps: Mapping[float, int]) -> float:
    """Return z = (sum of n_i z_i^-2)^(-1/2), the noise multiplier of Gaussian releases together.

    Args:
        steps: maps each noise multiplier z_i > 0 to the number n_i of releases that have it; not
            empty.
    """
    least = min(steps)  # taken out of the sum: no square over- or underflows
    return least / math.sqrt(sum(n * (least / z) ** 2 for z, n in steps.items()))

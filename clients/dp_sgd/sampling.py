"""Samplers: which examples enter a step, and the event that the step is charged as.

`sampling_schemes.py` has the facts of each sampling that need no numbers. A new sampling needs a
scheme there, a class here, and its row in docs/experiment_file.md and docs/dp_sgd.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, repeat
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import (
    EpochShuffled,
    Event,
    FixedSizeSampled,
    PoissonSampled,
    RandomAllocation,
)
from fedsim.clients.dp_sgd.sampling_schemes import (
    BALLS_AND_BINS,
    CYCLIC,
    CYCLIC_POISSON,
    FIXED_SIZE,
    POISSON,
    SHUFFLE,
    SamplingScheme,
)

Charges = list[tuple[Event, int]]
EpochStream = Callable[[int], np.random.Generator]


class Sampling(ABC):
    """How the lots of a client are drawn.

    Steps are numbered from 0 over the whole life of a client, across its rounds.

    Guarantee: a client that runs steps first_step ... first_step + steps − 1 with lots of `lots`
    and releases `mechanism` about each lot has released no more than `charges(mechanism,
    first_step, steps)` under each adjacency of `scheme`, given that the steps before were charged
    likewise.
    """

    scheme: ClassVar[SamplingScheme]
    has_even_lots: ClassVar[bool] = False  # whether sizes of lots differ by at most one

    @classmethod
    @abstractmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling of one client and its expected lot, in examples.

        Args:
            num_examples: the public number of examples, at least 1.
            batch_size: examples in a lot: expected, or at most where an epoch is divided.
            sampling_rate: the exact rate behind `batch_size`, where the rate was given.
        """

    @property
    @abstractmethod
    def sampling_rate(self) -> float:
        """Expected fraction of the examples in one lot."""

    def within_rounds(self, steps: int) -> "Sampling":
        """Return the sampling for lots that no later round can draw again; this one, as a rule.

        Args:
            steps: steps of every round of a client; only its last round may have fewer.
        """
        return self

    @property
    def separation(self) -> int:
        """Least number of steps from a lot that an example can be in to the next such lot."""
        return 1

    def spaced(self, steps: int) -> "Sampling":
        """Return the sampling with the same expected lot and a separation of at least `steps`.

        Args:
            steps: at least 1.

        Raises:
            ValueError: there is none.
        """
        if steps > self.separation:
            raise ValueError(
                f"sampling {self.scheme.name} lets an example be in two lots {self.separation} "
                f"step{'s' if self.separation > 1 else ''} apart, and {steps} are needed"
            )
        return self

    def usual_lot(self, expected_lot: float) -> int:
        """Return a public number of examples that few lots exceed, fewer than one in a hundred.

        Args:
            expected_lot: expected number of examples in a lot.
        """
        variance = 0.0 if self.has_even_lots else expected_lot * (1 - self.sampling_rate)
        return math.ceil(expected_lot + 2.5 * math.sqrt(variance))

    @abstractmethod
    def event(self, mechanism: Event) -> Event:
        """Return the event of `mechanism` about one lot, or about each lot of one epoch."""

    @abstractmethod
    def num_events(self, steps: int) -> int:
        """Return the number of events that the first `steps` steps of a client cost."""

    def charges(self, mechanism: Event, first_step: int, steps: int) -> Charges:
        """Return (event, count) for the additional cost of some steps.

        Args:
            mechanism: the release about one lot.
            first_step: number of the first step.
            steps: number of steps.
        """
        count = self.num_events(first_step + steps) - self.num_events(first_step)
        return [(self.event(mechanism), count)] if count else []

    @abstractmethod
    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the indices of the lots from `first_step` on, without end.

        Args:
            num_examples: examples of the client.
            stream: the client's sampling stream of this round.
            epochs: returns the client's stream of an epoch by its number, the same in every
                round: an unfinished epoch continues in the next round.
            first_step: steps that the client was charged for before.
        """


class IndependentLots(Sampling):
    """A sampling with independent lots: every step is an event."""

    @abstractmethod
    def lot(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the indices of one lot, ascending.

        Args:
            num_examples: examples of the client.
            generator: of the lot.
        """

    def num_events(self, steps: int) -> int:
        """Return one event for each step."""
        return steps

    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield lots drawn one after the other from `stream`."""
        while True:
            yield self.lot(num_examples, stream)


@dataclass(frozen=True)
class EpochLots(Sampling):
    """A sampling that divides all examples among the `batches` lots of an epoch.

    The division comes from the epoch's own stream, never from hidden state, so an epoch continues
    over rounds and over a restart. It is charged once, when its first lot is drawn.

    Raises:
        ValueError: there are no batches.
    """

    batches: int

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"an epoch needs at least one batch, got {self.batches}")

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return epochs of as few lots as keep each to `batch_size` on average, and that mean."""
        batches = math.ceil(num_examples / batch_size)
        return cls(batches), num_examples / batches

    @property
    def sampling_rate(self) -> float:
        """Expected fraction of the examples in one lot: 1 / batches."""
        return 1.0 / self.batches

    def num_events(self, steps: int) -> int:
        """Return one event for each epoch that the steps start."""
        return -(-steps // self.batches)

    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the lots of one epoch after the other."""
        if self.batches == 1:
            yield from repeat(np.arange(num_examples))
        divided: list[np.ndarray] = []
        for step in count(first_step):
            epoch, position = divmod(step, self.batches)
            if not divided or position == 0:
                divided = self.divide(num_examples, epochs(epoch))
            yield divided[position]

    @abstractmethod
    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the lots of one epoch; each example is in exactly one."""


@dataclass(frozen=True)
class PoissonSampling(IndependentLots):
    """Each example enters each lot independently with probability `rate`.

    Guarantee: inclusion is independent over examples and steps; a lot may be empty, and an empty
    lot is a lot like any other. This is what `PoissonSampled` accounts for (Abadi et al. 2016,
    section 3; Mironov et al. 2019).

    Raises:
        ValueError: the rate is not in [0, 1].
    """

    rate: float
    scheme: ClassVar[SamplingScheme] = POISSON

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"sampling rate must be in [0, 1], got {self.rate!r}")

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling at the given rate, or at batch_size / num_examples, at most 1."""
        if sampling_rate is not None:
            return cls(sampling_rate), sampling_rate * num_examples
        lot = min(batch_size, num_examples)
        return cls(lot / num_examples), float(lot)

    @property
    def sampling_rate(self) -> float:
        """Expected fraction of the examples in one lot: the rate."""
        return self.rate

    def lot(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the indices of one lot, ascending; its length is random, unless the rate is 1."""
        if self.rate == 1.0:
            return np.arange(num_examples)
        return (generator.random(num_examples) < self.rate).nonzero()[0]

    def event(self, mechanism: Event) -> PoissonSampled:
        """Return the event of one step that applies `mechanism` to a lot."""
        return PoissonSampled(self.rate, mechanism)


@dataclass(frozen=True)
class FixedSizeSampling(IndependentLots):
    """Each lot is a uniformly random subset of `batch` of the `population` examples.

    Guarantee: subsets are independent over steps. Another example fills the place of a missing
    one, so only replace-one adjacency is claimed (Wang, Balle, Kasiviswanathan 2019); the number
    of examples is public.

    Raises:
        ValueError: not 1 ≤ batch ≤ population.
    """

    population: int
    batch: int
    scheme: ClassVar[SamplingScheme] = FIXED_SIZE
    has_even_lots: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= self.population:
            raise ValueError(
                f"batch must be between 1 and the population {self.population}, got {self.batch}"
            )

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return lots of `batch_size` examples, or of all where there are fewer."""
        lot = min(batch_size, num_examples)
        return cls(num_examples, lot), float(lot)

    @property
    def sampling_rate(self) -> float:
        """Fraction of the examples in one lot."""
        return self.batch / self.population

    def lot(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the indices of one lot, ascending.

        Raises:
            ValueError: the client does not hold the public number of examples.
        """
        if num_examples != self.population:
            raise ValueError(
                f"lots of fixed size were charged for {self.population} examples, got "
                f"{num_examples}"
            )
        return np.sort(generator.choice(num_examples, self.batch, replace=False, shuffle=False))

    def event(self, mechanism: Event) -> FixedSizeSampled:
        """Return the event of one step that applies `mechanism` to a lot."""
        return FixedSizeSampled(self.population, self.batch, mechanism)


@dataclass(frozen=True)
class ShuffledEpochs(EpochLots):
    """Each epoch shuffles the examples anew and cuts them into `batches` lots of even length.

    Guarantee: an example is in exactly one lot of an epoch, and which one does not depend on any
    example's value. That is all: the lots of one shuffle depend on each other, so no amplification
    by sampling is claimed, and an epoch costs one release about a known lot (Chua et al. 2024).
    """

    scheme: ClassVar[SamplingScheme] = SHUFFLE
    has_even_lots: ClassVar[bool] = True

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the lots of one epoch; their lengths differ by at most one."""
        return np.array_split(generator.permutation(num_examples), self.batches)

    def event(self, mechanism: Event) -> EpochShuffled:
        """Return the event of one epoch that applies `mechanism` to each lot."""
        return EpochShuffled(self.batches, mechanism)


@dataclass(frozen=True)
class BallsAndBins(EpochLots):
    """Each epoch throws every example into one of `batches` lots, uniformly and independently.

    Guarantee: allocations are independent over examples and epochs; lots may be empty. This is
    what `RandomAllocation` accounts for (Chua et al. 2025; Feldman and Shenfeld 2025).
    """

    scheme: ClassVar[SamplingScheme] = BALLS_AND_BINS

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the lots of one epoch, ascending; their lengths are random."""
        bins = generator.integers(self.batches, size=num_examples)
        ends = np.cumsum(np.bincount(bins, minlength=self.batches))
        return np.split(np.argsort(bins, kind="stable"), ends[:-1])

    def event(self, mechanism: Event) -> RandomAllocation:
        """Return the event of one epoch that applies `mechanism` to each lot."""
        return RandomAllocation(self.batches, mechanism)

    def within_rounds(self, steps: int) -> "BallsAndBinsByRound":
        """Return the sampling with new epochs in every round of `steps` steps."""
        return BallsAndBinsByRound(self.batches, steps)


@dataclass(frozen=True)
class BallsAndBinsByRound(BallsAndBins):
    """Balls and bins for lots from the operating system: every round starts a new epoch.

    Nothing of a division outlives its round, so a round's last epoch may end early. It is charged
    in full: the releases about some lots of an epoch are a part of the releases about all of them.

    Attributes:
        round_steps: steps of every round of a client; only its last round may have fewer.

    Raises:
        ValueError: there are no batches, or rounds have no steps.
    """

    round_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round_steps < 1:
            raise ValueError(f"a round needs at least one step, got {self.round_steps}")

    def num_events(self, steps: int) -> int:
        """Return one event for each epoch that the steps start."""
        rounds, rest = divmod(steps, self.round_steps)
        return rounds * super().num_events(self.round_steps) + super().num_events(rest)

    def charges(self, mechanism: Event, first_step: int, steps: int) -> Charges:
        """Return the charge for every epoch that the steps start.

        Args:
            mechanism: the release about one lot.
            first_step: number of the first step, which starts an epoch.
            steps: number of steps.

        Raises:
            ValueError: the first step is within an epoch, whose division is gone.
        """
        self._position(first_step, first=True)
        return super().charges(mechanism, first_step, steps)

    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the lots of one epoch after the other, all of them drawn from `stream`.

        Raises:
            ValueError: the first step is within an epoch, whose division is gone.
        """
        divided: list[np.ndarray] = []
        for step in count(first_step):
            position = self._position(step, first=step == first_step)
            if position == 0:
                divided = self.divide(num_examples, stream)
            yield divided[position]

    def _position(self, step: int, *, first: bool) -> int:
        """Return the place of a step's lot in its epoch; the first step of a round has place 0."""
        position = step % self.round_steps % self.batches
        if first and position:
            raise ValueError(
                f"rounds of {self.round_steps} steps start a new epoch of {self.batches} lots each "
                f"time, and step {step} is within an epoch"
            )
        return position


@dataclass(frozen=True)
class CyclicLots(EpochLots):
    """The examples are divided once, and the `batches` lots come in the same order in each cycle.

    Guarantee: an example is in one lot of a cycle, always the same one, which does not depend on
    any example's value. Lots are known, so no amplification is claimed: a cycle costs one release.
    """

    scheme: ClassVar[SamplingScheme] = CYCLIC
    has_even_lots: ClassVar[bool] = True

    @property
    def separation(self) -> int:
        """Steps from an example's lot to its next one: the lots of a cycle."""
        return self.batches

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the lots of a cycle; their lengths differ by at most one."""
        return np.array_split(generator.permutation(num_examples), self.batches)

    def event(self, mechanism: Event) -> EpochShuffled:
        """Return the event of one cycle that applies `mechanism` to each lot."""
        return EpochShuffled(self.batches, mechanism)

    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the lots of one cycle after the other, all cycles divided by epoch 0's stream."""
        return super().lots(num_examples, stream, epochs=lambda _: epochs(0), first_step=first_step)


@dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """The examples are divided once into `groups`, which take turns; Poisson within a group.

    Guarantee: at step t each example of group t mod `groups` enters the lot with probability
    `rate`, independently of all others and of other steps, and no other example does. An example
    has one chance in a cycle of `groups` steps, which is `PoissonSampled` (Choquette-Choo et al.
    2023, arXiv:2306.08153, section 5). The division does not depend on any example's value.

    Raises:
        ValueError: there are no groups, or the rate is not in [0, 1].
    """

    groups: int
    rate: float
    scheme: ClassVar[SamplingScheme] = CYCLIC_POISSON

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"cyclic lots need at least one group, got {self.groups}")
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"sampling rate must be in [0, 1], got {self.rate!r}")

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return one group with Poisson lots; `spaced` divides it."""
        lots, expected = PoissonSampling.for_client(
            num_examples, batch_size, sampling_rate=sampling_rate
        )
        return cls(1, lots.rate), expected

    @property
    def sampling_rate(self) -> float:
        """Expected fraction of the examples in one lot: rate / groups."""
        return self.rate / self.groups

    @property
    def separation(self) -> int:
        """Steps from an example's chance to its next one: the number of groups."""
        return self.groups

    def spaced(self, steps: int) -> "CyclicPoisson":
        """Return the sampling with `steps` groups, and the rate that keeps the expected lot.

        Args:
            steps: at least 1.

        Raises:
            ValueError: groups so small that their lots would need a rate above 1.
        """
        rate = self.sampling_rate * steps
        if rate > 1.0 + 1e-9:
            raise ValueError(
                f"lots of {self.sampling_rate:.3g} of the examples cannot come from one of {steps} "
                f"groups: at most {int(1.0 / self.sampling_rate + 1e-9)} groups are that large"
            )
        return CyclicPoisson(steps, min(1.0, rate))

    def event(self, mechanism: Event) -> PoissonSampled:
        """Return the event of one cycle that applies `mechanism` to each lot."""
        return PoissonSampled(self.rate, mechanism)

    def num_events(self, steps: int) -> int:
        """Return one event for each cycle that the steps start."""
        return -(-steps // self.groups)

    def lots(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield lots, ascending, each drawn from the group of its step."""
        divided = np.array_split(epochs(0).permutation(num_examples), self.groups)
        groups = [np.sort(group) for group in divided]
        for step in count(first_step):
            group = groups[step % self.groups]
            yield group[stream.random(len(group)) < self.rate]


SAMPLINGS: Mapping[str, type[Sampling]] = {
    cls.scheme.name: cls
    for cls in (
        PoissonSampling,
        FixedSizeSampling,
        ShuffledEpochs,
        BallsAndBins,
        CyclicLots,
        CyclicPoisson,
    )
}

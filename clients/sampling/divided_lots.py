"""Lots that divide the examples: anew in every epoch, or once, in cycles of a fixed distance."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import EpochShuffled, Event, PoissonSampled, RandomAllocation
from fedsim.clients.sampling.sampling import (
    Charges,
    EpochLots,
    EpochStream,
    PoissonSampling,
    Sampling,
)
from fedsim.clients.sampling.schemes import (
    BALLS_AND_BINS,
    CYCLIC,
    CYCLIC_POISSON,
    SHUFFLE,
    SamplingScheme,
)


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
            ValueError: the first step is within an epoch, and its lots are not stored.
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
            ValueError: the first step is within an epoch, and its lots are not stored.
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

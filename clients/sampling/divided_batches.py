"""Samplings that divide the examples among batches, anew in every epoch or once; all by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import EpochShuffled, Event, PoissonSampled, RandomAllocation
from fedsim.clients.sampling.sampling import (
    Charges,
    EpochBatches,
    EpochStream,
    FixedSizeSampling,
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
class ShuffledEpochs(EpochBatches):
    """Sampling that shuffles the examples in each epoch and cuts them into `batches` batches.

    Guarantee: an example is in exactly one batch of an epoch, and this choice depends on no
    example's value. Batches of a shuffle depend on each other, so no amplification by sampling is
    claimed: an epoch costs one release on a known batch (Chua et al. 2024).
    """

    scheme: ClassVar[SamplingScheme] = SHUFFLE
    has_even_batches: ClassVar[bool] = True

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the example indices of each batch of an epoch; batch sizes differ by at most 1."""
        return np.array_split(generator.permutation(num_examples), self.batches)

    def event(self, mechanism: Event) -> EpochShuffled:
        """Return the privacy event of an epoch in which `mechanism` is applied to each batch."""
        return EpochShuffled(self.batches, mechanism)


@dataclass(frozen=True)
class BallsAndBins(EpochBatches):
    """Sampling that puts every example into one of `batches` batches at random in each epoch.

    Guarantee: the choice of the batch is uniform and independent over examples and epochs; batches
    may be empty. This is what `RandomAllocation` accounts for (balls and bins; Chua et al. 2025;
    Feldman and Shenfeld 2025).
    """

    scheme: ClassVar[SamplingScheme] = BALLS_AND_BINS

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the ascending example indices of each batch of an epoch; the sizes are random."""
        bins = generator.integers(self.batches, size=num_examples)
        ends = np.cumsum(np.bincount(bins, minlength=self.batches))
        return np.split(np.argsort(bins, kind="stable"), ends[:-1])

    def event(self, mechanism: Event) -> RandomAllocation:
        """Return the privacy event of an epoch in which `mechanism` is applied to each batch."""
        return RandomAllocation(self.batches, mechanism)

    def within_rounds(self, steps: int) -> "BallsAndBinsByRound":
        """Return the sampling that starts a new epoch in every round of `steps` steps."""
        return BallsAndBinsByRound(self.batches, steps)


@dataclass(frozen=True)
class BallsAndBinsByRound(BallsAndBins):
    """Balls-and-bins sampling that starts a new epoch in every round, for `noise: secure`.

    With this noise, batches come from the operating system's randomness, which does not repeat, and
    are not stored. So the last epoch of a round may end early. It is charged in full, which is an
    upper bound for releases on only some of its batches.

    Attributes:
        round_steps: number of steps in every round of a client; the last round may have fewer.

    Raises:
        ValueError: there are no batches, or rounds have no steps.
    """

    round_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round_steps < 1:
            raise ValueError(f"a round needs at least one step, got {self.round_steps}")

    def num_events(self, steps: int) -> int:
        """Return the number of epochs that start in the first `steps` steps; each is one event."""
        rounds, rest = divmod(steps, self.round_steps)
        return rounds * super().num_events(self.round_steps) + super().num_events(rest)

    def charges(self, mechanism: Event, first_step: int, steps: int) -> Charges:
        """Return (event, count) pairs for the epochs that start in the given steps.

        Args:
            mechanism: the privacy event of the release on one batch.
            first_step: number of the first step; an epoch must start there.
            steps: number of steps.

        Raises:
            ValueError: the first step is in the middle of an epoch.
        """
        self._position(first_step, first=True)
        return super().charges(mechanism, first_step, steps)

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the batches of each epoch in turn, all drawn from the round's random stream.

        Raises:
            ValueError: the first step is in the middle of an epoch. The other batches of this epoch
                are not stored between rounds.
        """
        divided: list[np.ndarray] = []
        for step in count(first_step):
            position = self._position(step, first=step == first_step)
            if position == 0:
                divided = self.divide(num_examples, stream)
            yield divided[position]

    def _position(self, step: int, *, first: bool) -> int:
        """Return the position of a step within its epoch, which is 0 for a round's first step."""
        position = step % self.round_steps % self.batches
        if first and position:
            raise ValueError(
                f"every round of {self.round_steps} steps must start a new epoch of {self.batches} "
                f"batches, and step {step} is within an epoch"
            )
        return position


@dataclass(frozen=True)
class CyclicBatches(EpochBatches):
    """Sampling that cuts the examples into `batches` batches once and uses them in cycles.

    Guarantee: an example is in the same single batch of every cycle, and this choice depends on no
    example's value. Batches are known, so there is no amplification: a cycle costs one release.
    """

    scheme: ClassVar[SamplingScheme] = CYCLIC
    has_even_batches: ClassVar[bool] = True

    @property
    def separation(self) -> int:
        """Number of steps from one use of an example to the next, equal to `batches`."""
        return self.batches

    def divide(self, num_examples: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Return the example indices of each batch of a cycle; batch sizes differ by at most 1."""
        return np.array_split(generator.permutation(num_examples), self.batches)

    def event(self, mechanism: Event) -> EpochShuffled:
        """Return the privacy event of a cycle in which `mechanism` is applied to each batch."""
        return EpochShuffled(self.batches, mechanism)

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the batches of each cycle in turn; every cycle has the same batches."""
        return super().draw_batches(
            num_examples, stream, epochs=lambda _: epochs(0), first_step=first_step
        )


@dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Sampling with fixed groups of examples that take turns, and Poisson sampling in each group.

    Guarantee: at step t, only examples of group t mod `groups` can enter the batch. Each does so
    with probability `rate`, independently of other examples and other steps. So an example can
    enter only one batch in a cycle of `groups` steps, as `PoissonSampled` assumes (Choquette-Choo
    et al. 2023, arXiv:2306.08153, section 5). The groups depend on no example's value.

    Attributes:
        groups: number of groups.
        rate: probability that an example of the current group enters the batch.

    Raises:
        ValueError: there are no groups, or the rate is not in [0, 1].
    """

    groups: int
    rate: float
    scheme: ClassVar[SamplingScheme] = CYCLIC_POISSON

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"cyclic batches need at least one group, got {self.groups}")
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"sampling rate must be in [0, 1], got {self.rate!r}")

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling with a single group for a client, and the expected batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: expected batch size; used if no rate is given.
            sampling_rate: the sampling rate; None stands for batch_size / num_examples, at most 1.
        """
        batches, expected = PoissonSampling.for_client(
            num_examples, batch_size, sampling_rate=sampling_rate
        )
        return cls(1, batches.rate), expected

    @property
    def sampling_rate(self) -> float:
        """Expected share of the client's examples that a batch contains: rate / groups."""
        return self.rate / self.groups

    @property
    def separation(self) -> int:
        """Smallest number of steps from one use of an example to the next: the number of groups."""
        return self.groups

    def spaced(self, steps: int) -> "CyclicPoisson":
        """Return the sampling with `steps` groups and the same expected batch size.

        Args:
            steps: number of groups, at least 1.

        Raises:
            ValueError: the groups would be smaller than the expected batch.
        """
        rate = self.sampling_rate * steps
        if rate > 1.0 + 1e-9:
            raise ValueError(
                f"batches of {self.sampling_rate:.3g} of the examples cannot come from one of "
                f"{steps} groups: at most {int(1.0 / self.sampling_rate + 1e-9)} groups are that "
                "large"
            )
        return CyclicPoisson(steps, min(1.0, rate))

    def event(self, mechanism: Event) -> PoissonSampled:
        """Return the privacy event of a cycle in which `mechanism` is applied to each batch."""
        return PoissonSampled(self.rate, mechanism)

    def num_events(self, steps: int) -> int:
        """Return the number of cycles that start in the first `steps` steps; each is one event."""
        return -(-steps // self.groups)

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the ascending example indices of each batch, drawn from the group of the step."""
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
        CyclicBatches,
        CyclicPoisson,
    )
}
"""The class of each sampling, by its name in `privacy.sampling`."""

"""How the batches of a client are drawn, and the privacy events that its steps are charged as.

`schemes.py` has the facts of each sampling that do not depend on numbers. A new sampling needs a
scheme there, a subclass of `Sampling`, an entry of `catalog.py`, and rows in
docs/explain/dp_sgd.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import Event, FixedSizeSampled, PoissonSampled
from fedsim.clients.sampling.schemes import FIXED_SIZE, POISSON, SamplingScheme

Charges = list[tuple[Event, int]]
EpochStream = Callable[[int], np.random.Generator]


class Sampling(ABC):
    """How the batches of a client are drawn, with the privacy events of its steps.

    Steps are numbered from 0 over the whole run of a client, across its rounds.

    Guarantee: a client that runs steps first_step ... first_step + steps − 1 with batches of
    `batches` and applies `mechanism` to each batch has released no more than `charges(mechanism,
    first_step, steps)` under each adjacency of `scheme`, given that earlier steps were charged
    likewise.

    Attributes:
        scheme: name and properties of the sampling.
        has_even_batches: whether batch sizes differ by at most one.
    """

    scheme: ClassVar[SamplingScheme]
    has_even_batches: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling of one client, and its expected batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: expected batch size; a limit of the mean where an epoch is divided.
            sampling_rate: the exact rate from which `batch_size` was rounded, or None if the
                settings give no rate.
        """

    @property
    @abstractmethod
    def sampling_rate(self) -> float:
        """Expected share of the examples in a batch."""

    def within_rounds(self, steps: int) -> "Sampling":
        """Return the sampling for batches that cannot be drawn again in a later round.

        Most samplings return `self`; one whose epochs span rounds starts a new epoch in each.

        Args:
            steps: number of steps in every round of a client; the last round may have fewer.
        """
        return self

    @property
    def separation(self) -> int:
        """Least number of steps between two batches that an example can be in."""
        return 1

    def spaced(self, steps: int) -> "Sampling":
        """Return the sampling with a separation of at least `steps`, and the same expected batch.

        Args:
            steps: least number of steps between two uses of an example, at least 1.

        Raises:
            ValueError: the sampling cannot keep this distance.
        """
        if steps > self.separation:
            raise ValueError(
                f"sampling {self.scheme.name} lets an example be in two batches {self.separation} "
                f"step{'s' if self.separation > 1 else ''} apart, and {steps} are needed"
            )
        return self

    def usual_batch(self, expected_batch: float) -> int:
        """Return a public batch size that fewer than one batch in a hundred exceeds.

        Args:
            expected_batch: expected batch size.
        """
        variance = 0.0 if self.has_even_batches else expected_batch * (1 - self.sampling_rate)
        return math.ceil(expected_batch + 2.5 * math.sqrt(variance))

    @abstractmethod
    def event(self, mechanism: Event) -> Event:
        """Return the privacy event of applying `mechanism` to a batch, or to all of an epoch.

        Args:
            mechanism: the privacy event of the release on one given batch.
        """

    @abstractmethod
    def num_events(self, steps: int) -> int:
        """Return how many events the first `steps` steps of a client are charged as."""

    def charges(self, mechanism: Event, first_step: int, steps: int) -> Charges:
        """Return the privacy events of further steps, as (event, count) pairs.

        Args:
            mechanism: the privacy event of the release on one given batch.
            first_step: number of the first of these steps.
            steps: number of steps.
        """
        count = self.num_events(first_step + steps) - self.num_events(first_step)
        return [(self.event(mechanism), count)] if count else []

    @abstractmethod
    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of one batch after the other from `first_step` on, forever.

        Args:
            num_examples: number of examples of the client.
            stream: the client's random stream of this round for sampling.
            epochs: returns the client's random stream of an epoch by its number, the same in every
                round, so that an unfinished epoch continues in the next round.
            first_step: number of steps that the client was charged for before.
        """


class IndependentBatches(Sampling):
    """A sampling that draws each batch independently, so that every step is one event."""

    @abstractmethod
    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch.

        Args:
            num_examples: number of examples of the client.
            generator: random generator to draw the batch from.
        """

    def num_events(self, steps: int) -> int:
        """Return `steps`: every step is one event."""
        return steps

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of one batch after the other, drawn from `stream`."""
        while True:
            yield self.draw_batch(num_examples, stream)


@dataclass(frozen=True)
class EpochBatches(Sampling):
    """A sampling that divides all examples among the `batches` batches of an epoch.

    Each epoch has a separate random stream and there is no hidden state, so an epoch continues over
    rounds and over a restart. It is charged once, when its first batch is drawn.

    Attributes:
        batches: number of batches in an epoch.

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
        """Return epochs of the fewest batches with a mean size up to `batch_size`, and that mean.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: upper limit of the mean batch size.
            sampling_rate: not used.
        """
        batches = math.ceil(num_examples / batch_size)
        return cls(batches), num_examples / batches

    @property
    def sampling_rate(self) -> float:
        """Expected share of the examples in a batch: 1 / batches."""
        return 1.0 / self.batches

    def num_events(self, steps: int) -> int:
        """Return the number of epochs that the first `steps` steps start, each one event."""
        return -(-steps // self.batches)

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of each batch, one epoch after the other."""
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
        """Return the example indices of each batch of one epoch; each example is in one batch.

        Args:
            num_examples: number of examples of the client.
            generator: random generator of the epoch.
        """


@dataclass(frozen=True)
class PoissonSampling(IndependentBatches):
    """Each example enters each batch independently with probability `rate`.

    Guarantee: inclusion is independent over examples and steps; a batch may be empty, and is then
    used like any other. This is what `PoissonSampled` accounts for (Abadi et al. 2016, section 3;
    Mironov et al. 2019).

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
        """Return the sampling, and its expected batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: expected batch size, if no rate is given.
            sampling_rate: the sampling rate; None stands for batch_size / num_examples, at most 1.
        """
        if sampling_rate is not None:
            return cls(sampling_rate), sampling_rate * num_examples
        batch = min(batch_size, num_examples)
        return cls(batch / num_examples), float(batch)

    @property
    def sampling_rate(self) -> float:
        """Expected share of the examples in a batch: `rate`."""
        return self.rate

    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch, whose size is random."""
        if self.rate == 1.0:
            return np.arange(num_examples)
        return (generator.random(num_examples) < self.rate).nonzero()[0]

    def event(self, mechanism: Event) -> PoissonSampled:
        """Return the privacy event of one step that applies `mechanism` to a batch."""
        return PoissonSampled(self.rate, mechanism)


@dataclass(frozen=True)
class FixedSizeSampling(IndependentBatches):
    """Each batch is a uniformly random subset of `batch` of the `population` examples.

    Guarantee: subsets are independent over steps. Another example takes the place of a missing
    one, so only replace-one adjacency is claimed (Wang, Balle, Kasiviswanathan 2019); the number
    of examples is public.

    Raises:
        ValueError: not 1 ≤ batch ≤ population.
    """

    population: int
    batch: int
    scheme: ClassVar[SamplingScheme] = FIXED_SIZE
    has_even_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= self.population:
            raise ValueError(
                f"batch must be between 1 and the population {self.population}, got {self.batch}"
            )

    @classmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling of `batch_size` examples, at most all, and that batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: number of examples in a batch.
            sampling_rate: not used.
        """
        batch = min(batch_size, num_examples)
        return cls(num_examples, batch), float(batch)

    @property
    def sampling_rate(self) -> float:
        """Share of the examples in a batch: batch / population."""
        return self.batch / self.population

    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch.

        Raises:
            ValueError: the client does not hold the public number of examples.
        """
        if num_examples != self.population:
            raise ValueError(
                f"batches of fixed size were charged for {self.population} examples, got "
                f"{num_examples}"
            )
        return np.sort(generator.choice(num_examples, self.batch, replace=False, shuffle=False))

    def event(self, mechanism: Event) -> FixedSizeSampled:
        """Return the privacy event of one step that applies `mechanism` to a batch."""
        return FixedSizeSampled(self.population, self.batch, mechanism)

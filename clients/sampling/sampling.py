"""Base classes of samplings, which draw batches and return the privacy events of steps.

`schemes.py` has the fixed properties of each sampling. A new sampling needs a scheme there, a
subclass of `Sampling`, an entry of `SAMPLINGS`, and rows in docs/explain/dp_sgd.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, repeat
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import Event, FixedSizeSampled, PoissonSampled
from fedsim.clients.sampling.schemes import FIXED_SIZE, POISSON, SamplingScheme

Charges = list[tuple[Event, int]]
EpochStream = Callable[[int], np.random.Generator]


class Sampling(ABC):
    """Base class of a client's sampling: it draws batches and gives the privacy events of steps.

    Steps are numbered from 0 over the whole run of a client, across its rounds.

    Guarantee: suppose that a client runs steps first_step ... first_step + steps − 1 with batches
    of `draw_batches` and applies `mechanism` to each batch, and that earlier steps were charged in
    the same way. Then `charges(mechanism, first_step, steps)` covers the release under each
    adjacency of `scheme`.

    Attributes:
        scheme: name and fixed properties of the sampling.
        has_even_batches: whether batch sizes differ by at most one.
    """

    scheme: ClassVar[SamplingScheme]
    has_even_batches: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def for_client(
        cls, num_examples: int, batch_size: int, *, sampling_rate: float | None = None
    ) -> tuple[Self, float]:
        """Return the sampling for one client, and the expected batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: expected batch size. If the examples are divided into batches, it is the
                upper limit of the mean batch size.
            sampling_rate: the exact sampling rate, if `batch_size` is rounded from it; or None.
        """

    @property
    @abstractmethod
    def sampling_rate(self) -> float:
        """Expected share of the client's examples that a batch contains."""

    def within_rounds(self, steps: int) -> "Sampling":
        """Return the sampling to use if no round can repeat the batches of an earlier round.

        This is so with `noise: secure`. Most samplings return `self`. A sampling whose epochs span
        rounds returns one that starts a new epoch in each round.

        Args:
            steps: number of steps in every round of a client; the last round may have fewer.
        """
        return self

    @property
    def separation(self) -> int:
        """Smallest number of steps from one batch to the next that can contain the same example."""
        return 1

    def spaced(self, steps: int) -> "Sampling":
        """Return the sampling with a `separation` of at least `steps` and the same batch size.

        Args:
            steps: smallest number of steps between two uses of an example, at least 1.

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
        """Return a public batch size that fewer than one in a hundred batches exceed.

        Args:
            expected_batch: expected batch size.
        """
        variance = 0.0 if self.has_even_batches else expected_batch * (1 - self.sampling_rate)
        return math.ceil(expected_batch + 2.5 * math.sqrt(variance))

    @abstractmethod
    def event(self, mechanism: Event) -> Event:
        """Return the privacy event to charge, sampling included.

        The event covers one step if batches are drawn independently, otherwise an epoch or cycle.

        Args:
            mechanism: the privacy event of the release on one fixed batch.
        """

    @abstractmethod
    def num_events(self, steps: int) -> int:
        """Return how many privacy events the first `steps` steps of a client cost."""

    def charges(self, mechanism: Event, first_step: int, steps: int) -> Charges:
        """Return the privacy events of further steps, as (event, count) pairs.

        Args:
            mechanism: the privacy event of the release on one fixed batch.
            first_step: number of the first of these steps.
            steps: number of steps.
        """
        count = self.num_events(first_step + steps) - self.num_events(first_step)
        return [(_event(self, mechanism), count)] if count else []

    @abstractmethod
    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of each batch in turn, from step `first_step` on, without end.

        Args:
            num_examples: number of examples of the client.
            stream: the client's random stream for sampling in this round.
            epochs: function from the number of an epoch to the client's random stream for the
                epoch. The stream is the same in every round, so an unfinished epoch continues in
                the next round.
            first_step: number of steps that the client was charged for before.
        """


@lru_cache(maxsize=1024)
def _event(sampling: Sampling, mechanism: Event) -> Event:
    """Return the event of a sampling, which all clients with an equal one share."""
    return sampling.event(mechanism)


class IndependentBatches(Sampling):
    """Base class of samplings that draw each batch independently; every step is one event."""

    @abstractmethod
    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch.

        Args:
            num_examples: number of examples of the client.
            generator: random generator that draws the batch.
        """

    def num_events(self, steps: int) -> int:
        """Return `steps`, because every step is one event."""
        return steps

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of each batch in turn, drawn from the round's random stream."""
        while True:
            yield self.draw_batch(num_examples, stream)


@dataclass(frozen=True)
class EpochBatches(Sampling):
    """Base class of samplings that divide all examples among the `batches` batches of an epoch.

    Each epoch has its own random stream and there is no other state. So an epoch can continue in
    the next round and after a restart. It is charged once, when its first batch is drawn.

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
        """Return a client's sampling, and the mean size of its batches.

        An epoch has the fewest batches for which the mean size is at most `batch_size`.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: upper limit of the mean batch size.
            sampling_rate: not used.
        """
        batches = math.ceil(num_examples / batch_size)
        return cls(batches), num_examples / batches

    @property
    def sampling_rate(self) -> float:
        """Expected share of the client's examples that a batch contains: 1 / batches."""
        return 1.0 / self.batches

    def num_events(self, steps: int) -> int:
        """Return the number of epochs that start in the first `steps` steps; each is one event."""
        return -(-steps // self.batches)

    def draw_batches(
        self,
        num_examples: int,
        stream: np.random.Generator,
        *,
        epochs: EpochStream,
        first_step: int,
    ) -> Iterator[np.ndarray]:
        """Yield the example indices of each batch in turn, epoch after epoch."""
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
        """Return the example indices of each batch of an epoch; each example is in one batch.

        Args:
            num_examples: number of examples of the client.
            generator: random generator of the epoch.
        """


@dataclass(frozen=True)
class PoissonSampling(IndependentBatches):
    """Poisson sampling: each example enters each batch independently with probability `rate`.

    Guarantee: inclusion is independent over examples and steps. A batch may be empty, and an empty
    batch is used like any other. This is what `PoissonSampled` accounts for (Abadi et al. 2016,
    section 3; Mironov et al. 2019).

    Raises:
        ValueError: the rate is not in [0, 1].

    Example:
        >>> from fedsim.accountant import Gaussian
        >>> from fedsim.clients.sampling.sampling import PoissonSampling
        >>> PoissonSampling(0.25).event(Gaussian(1.0))
        PoissonSampled(sampling_rate=0.25, event=Gaussian(noise_multiplier=1.0))
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
        """Return the sampling for one client, and the expected batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: expected batch size; used if no rate is given.
            sampling_rate: the sampling rate; None stands for batch_size / num_examples, at most 1.
        """
        if sampling_rate is not None:
            return cls(sampling_rate), sampling_rate * num_examples
        batch = min(batch_size, num_examples)
        return cls(batch / num_examples), float(batch)

    @property
    def sampling_rate(self) -> float:
        """Expected share of the client's examples that a batch contains: `rate`."""
        return self.rate

    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch, whose size is random."""
        if self.rate == 1.0:
            return np.arange(num_examples)
        return (generator.random(num_examples) < self.rate).nonzero()[0]

    def event(self, mechanism: Event) -> PoissonSampled:
        """Return the privacy event of one step, which applies `mechanism` to a batch."""
        return PoissonSampled(self.rate, mechanism)


@dataclass(frozen=True)
class FixedSizeSampling(IndependentBatches):
    """Sampling without replacement: each batch is `batch` of the `population` examples.

    Guarantee: subsets are uniform, and independent over steps. Batches have a fixed size, so
    if an example is removed, another one is drawn in its place. Therefore only replace-one
    adjacency is claimed (Wang, Balle, Kasiviswanathan 2019). The number of examples is public.

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
        """Return the sampling for one client, and its batch size.

        Args:
            num_examples: the client's public number of examples, at least 1.
            batch_size: number of examples in a batch; if there are fewer, a batch is all examples.
            sampling_rate: not used.
        """
        batch = min(batch_size, num_examples)
        return cls(num_examples, batch), float(batch)

    @property
    def sampling_rate(self) -> float:
        """Share of the client's examples that a batch contains: batch / population."""
        return self.batch / self.population

    def draw_batch(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the ascending example indices of one batch.

        Raises:
            ValueError: the client does not have the public number of examples.
        """
        if num_examples != self.population:
            raise ValueError(
                f"batches of fixed size were charged for {self.population} examples, got "
                f"{num_examples}"
            )
        return np.sort(generator.choice(num_examples, self.batch, replace=False, shuffle=False))

    def event(self, mechanism: Event) -> FixedSizeSampled:
        """Return the privacy event of one step, which applies `mechanism` to a batch."""
        return FixedSizeSampled(self.population, self.batch, mechanism)

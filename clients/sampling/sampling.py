"""How the lots of a client are drawn, and the events that its steps are charged as.

`schemes.py` has the facts of each sampling that need no numbers. A new sampling needs a scheme
there, a subclass of `Sampling`, an entry of `catalog.py`, and its row in
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

"""Lots that do not depend on each other: each step is an event."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import Event, FixedSizeSampled, PoissonSampled
from fedsim.clients.sampling.sampling import IndependentLots
from fedsim.clients.sampling.schemes import FIXED_SIZE, POISSON, SamplingScheme


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

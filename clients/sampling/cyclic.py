"""Cycles: the examples are divided once, and an example's lots keep a fixed distance."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Self

import numpy as np

from fedsim.accountant import EpochShuffled, Event, PoissonSampled
from fedsim.clients.sampling.independent_lots import PoissonSampling
from fedsim.clients.sampling.sampling import EpochLots, EpochStream, Sampling
from fedsim.clients.sampling.schemes import CYCLIC, CYCLIC_POISSON, SamplingScheme


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

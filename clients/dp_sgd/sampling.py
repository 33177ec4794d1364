"""Which examples enter a step: the sampler and the event it must be charged as."""

from dataclasses import dataclass

import numpy as np

from fedsim.accountant import Gaussian, PoissonSampled


@dataclass(frozen=True)
class PoissonSampling:
    """Each example enters each lot independently with probability `rate`.

    Guarantee: inclusion is independent over examples and steps; a lot may be empty, and an empty
    lot is a lot like any other. This is what `PoissonSampled` accounts for (Abadi et al. 2016,
    section 3; Mironov et al. 2019).
    """

    rate: float

    def lot(self, num_examples: int, generator: np.random.Generator) -> np.ndarray:
        """Return the indices of one lot, ascending; its length is random."""
        return np.flatnonzero(generator.random(num_examples) < self.rate)

    def event(self, mechanism: Gaussian) -> PoissonSampled:
        """Return the event of one step that applies `mechanism` to a lot."""
        return PoissonSampled(self.rate, mechanism)

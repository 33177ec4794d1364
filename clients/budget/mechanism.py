"""What the budget of a client needs to know of its mechanism, whatever the unit is."""

from typing import Protocol

from fedsim.clients.correlated_noise.correlation import NoiseCorrelation
from fedsim.clients.sampling.sampling import Charges
from fedsim.protocol.clip_bound import LearntBound


class Mechanism(Protocol):
    """A release that a client repeats: a step of DP-SGD, or its whole update."""

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z of one release."""
        ...

    @property
    def sampling_rate(self) -> float:
        """Probability with which the unit is in one release."""
        ...

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier z' ≤ z, which the grid leaves."""
        ...

    @property
    def adapted_clip_norm(self) -> LearntBound | None:
        """The bound, where it is learnt; None where it is fixed."""
        ...

    @property
    def correlation(self) -> NoiseCorrelation | None:
        """The correlation of noise from release to release; None: independent noise."""
        ...

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for further releases of a client.

        Args:
            first_step: releases before.
            steps: number of further releases.
            noise_factor: noise of what is seen over the noise of the release, for a sum.
        """
        ...

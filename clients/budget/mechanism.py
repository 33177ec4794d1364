"""What the budget of a client needs to know of its mechanism, whatever the unit is."""

from typing import Protocol

from fedsim.clients.dp_sgd.noise_correlation import NoiseCorrelation
from fedsim.clients.dp_sgd.sampling import Charges


class Mechanism(Protocol):
    """A release that a client repeats: a step of DP-SGD, or its whole update.

    Attributes:
        noise_multiplier: z of one release.
        sampling_rate: probability with which the unit is in one release.
        effective_noise_multiplier: z' ≤ z, which the grid leaves.
        adapted_clip_norm: the bound, where it is learnt; None where it is fixed.
        correlation: of noise from release to release; None: independent.
    """

    @property
    def noise_multiplier(self) -> float: ...
    @property
    def sampling_rate(self) -> float: ...
    @property
    def effective_noise_multiplier(self) -> float: ...
    @property
    def adapted_clip_norm(self) -> float | None: ...
    @property
    def correlation(self) -> NoiseCorrelation | None: ...

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        """Return (event, count) for further releases of a client.

        Args:
            first_step: releases before.
            steps: number of further releases.
            noise_factor: noise of what is seen over the noise of the release, for a sum.
        """
        ...

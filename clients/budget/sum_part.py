"""A client's part of a noisy sum: who adds how much of the noise that its claim counts on."""

import math
from dataclasses import dataclass

_ROUNDED_DOWN = 1.0 - 2.0**-48  # more than the square root and the product round up


@dataclass(frozen=True)
class SumPart:
    """What a client's release is when only sums are seen.

    The release is the integers of a clipped contribution, with noise of one deviation or without.

    Attributes:
        honest: h, the fewest independent draws of noise in a sum that is opened, each as large as
            the one that the client's mechanism describes.
        adds_noise: whether the client draws its own (distributed trust); else the server draws one
            for the whole sum (central trust).
    """

    honest: int
    adds_noise: bool

    @property
    def noise_factor(self) -> float:
        """√h, rounded down: noise of the sum over that of one draw."""
        return math.sqrt(self.honest) * _ROUNDED_DOWN if self.honest > 1 else 1.0

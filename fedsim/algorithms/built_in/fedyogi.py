"""FedYogi: Yogi at the server: v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.server_optimizer import AdaptiveOptimizer, AdaptiveOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np


class FedYogi(AdaptiveOptimizer):
    """Yogi at the server: v ← v − (1 − β₂) Δ² sign(v − Δ²).

    Source: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.
    """

    name: ClassVar[str] = "fedyogi"
    description: ClassVar[str] = "Yogi at the server (Reddi et al. 2021)"
    Options: ClassVar[type[Settings]] = AdaptiveOptions
    options: AdaptiveOptions

    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return v − (1 − β₂) Δ² sign(v − Δ²)."""
        beta = self.options.beta_2
        sign = (v > square) * 1.0 - (v < square) * 1.0
        return v - (1 - beta) * square * sign

"""FedYogi: the server updates the global model by Yogi."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.server_optimizer import AdaptiveOptimizer, AdaptiveOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np


class FedYogi(AdaptiveOptimizer):
    """Yogi at the server: v ← v − (1 − β₂) Δ² sign(v − Δ²), with mean update Δ.

    v is the second moment, and β₂ is the option `beta_2`.

    Source: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.
    """

    name: ClassVar[str] = "fedyogi"
    description: ClassVar[str] = "Yogi at the server (Reddi et al. 2021)"
    Options: ClassVar[type[Settings]] = AdaptiveOptions
    options: AdaptiveOptions

    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next second moment v − (1 − β₂) Δ² sign(v − Δ²), where `square` is Δ².

        β₂ is the option `beta_2`.
        """
        beta = self.options.beta_2
        sign = (v > square) * 1.0 - (v < square) * 1.0
        return v - (1 - beta) * square * sign

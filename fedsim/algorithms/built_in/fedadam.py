"""FedAdam: the server updates the global model by Adam."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.server_optimizer import AdaptiveOptimizer, AdaptiveOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np


class FedAdam(AdaptiveOptimizer):
    """Adam at the server: v ← β₂ v + (1 − β₂) Δ², with mean update Δ and second moment v.

    Source: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.
    """

    name: ClassVar[str] = "fedadam"
    description: ClassVar[str] = "Adam at the server (Reddi et al. 2021)"
    Options: ClassVar[type[Settings]] = AdaptiveOptions
    options: AdaptiveOptions

    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next second moment β₂ v + (1 − β₂) Δ², where `square` is Δ².

        β₂ is the option `beta_2`.
        """
        beta = self.options.beta_2
        return beta * v + (1 - beta) * square

"""FedAdagrad: the server updates the global model by Adagrad."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.server_optimizer import AdaptiveOptimizer
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np


class FedAdagradOptions(Settings):
    """Settings of the algorithm `fedadagrad` below `federation.strategy`."""

    server_lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.0, ge=0, lt=1, description="decay of the first moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


class FedAdagrad(AdaptiveOptimizer):
    """Adagrad at the server: v ← v + Δ², with mean update Δ and second moment v.

    Source: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.
    """

    name: ClassVar[str] = "fedadagrad"
    description: ClassVar[str] = "Adagrad at the server (Reddi et al. 2021)"
    Options: ClassVar[type[Settings]] = FedAdagradOptions
    options: FedAdagradOptions

    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next second moment v + Δ², where `square` is Δ²."""
        return v + square

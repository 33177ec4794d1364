"""FedAvgM: FedAvg with momentum at the server."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.server_optimizer import ServerOptimizer
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from fedsim.algorithms.state import Arrays


class FedAvgMOptions(Settings):
    """Settings of the algorithm `fedavgm` below `federation.strategy`."""

    server_lr: float = Field(default=1.0, gt=0, description="server learning rate η")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum factor β")


class FedAvgM(ServerOptimizer):
    """FedAvg with momentum m at the server: m ← β m + Δ, x ← x + η m.

    x is the global model, Δ the mean update, β the momentum factor, and η the server learning rate.

    Source: Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", section 4.3.
    """

    name: ClassVar[str] = "fedavgm"
    description: ClassVar[str] = "FedAvg with momentum at the server (Hsu et al. 2019)"
    Options: ClassVar[type[Settings]] = FedAvgMOptions
    moments: ClassVar[str] = "m"
    options: FedAvgMOptions

    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return the step and the next momentum of one parameter.

        The step is the server learning rate times the next momentum.
        """
        m = self.options.momentum * moments["m"] + delta
        return self.options.server_lr * m, {"m": m}

"""FedProx: local steps are pulled towards the global model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import ClientRule
from fedsim.algorithms.built_in.fedavg import FedAvg, FedAvgOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class FedProxOptions(FedAvgOptions):
    """`federation.strategy` of `fedprox`."""

    proximal_weight: float = Field(
        default=1.0, ge=0, description="μ of the penalty μ/2 · ‖local − global‖²; 0: FedAvg"
    )


@dataclass(frozen=True)
class ProximalRule(ClientRule):
    """Adds the gradient of FedProx's penalty: g ← g + μ (w − w_global).

    Attributes:
        weight: μ, the weight of the penalty.
    """

    weight: float

    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Add the gradient of the penalty to the gradient."""
        gradient.add_(values - start, alpha=self.weight)


class FedProx(FedAvg):
    """FedAvg whose clients minimise loss + μ/2 ‖w − w_global‖².

    With DP-SGD the penalty's gradient is added to the release, as it depends on no example.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Algorithm 2. The
    paper uses μ = 1 for synthetic data.
    """

    name: ClassVar[str] = "fedprox"
    description: ClassVar[str] = "FedAvg with a pull towards the global model (Li et al. 2020)"
    Options: ClassVar[type[Settings]] = FedProxOptions

    def client(self) -> ClientRule | None:
        """Return the rule that adds the penalty's gradient."""
        return ProximalRule(self.options.proximal_weight)

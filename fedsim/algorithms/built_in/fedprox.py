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
    """Settings of the algorithm `fedprox` below `federation.strategy`."""

    proximal_weight: float = Field(
        default=1.0, ge=0, description="μ of the penalty μ/2 · ‖local − global‖²; 0: FedAvg"
    )


@dataclass(frozen=True)
class PullRule(ClientRule):
    """Rule that adds the gradient of a penalty on a distance: g ← g + μ (w − c).

    g is the gradient, w the client's values, and c the values towards which w is pulled.

    Attributes:
        weight: the weight μ of the penalty μ/2 · ‖w − c‖².
        to: name of the sent arrays c; "" for the client's values at the start of the round.
    """

    weight: float
    to: str = ""

    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Add the penalty's gradient μ (w − c) to `gradient`, in place."""
        gradient.add_(values - (sent[self.to] if self.to else start), alpha=self.weight)


class FedProx(FedAvg):
    """FedAvg with a penalty: clients minimise loss + μ/2 ‖w − w_global‖² over their model w.

    With DP-SGD the penalty's gradient is added after the noise, because it depends on no example.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Algorithm 2. The
    paper uses μ = 1 for synthetic data.
    """

    name: ClassVar[str] = "fedprox"
    description: ClassVar[str] = "FedAvg with a pull towards the global model (Li et al. 2020)"
    Options: ClassVar[type[Settings]] = FedProxOptions

    def client(self) -> ClientRule | None:
        """Return the rule that adds the gradient of the penalty μ/2 ‖w − w_global‖²."""
        return PullRule(self.options.proximal_weight)

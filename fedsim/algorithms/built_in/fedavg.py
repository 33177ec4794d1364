"""FedAvg: the next global model is the weighted mean of the clients' models."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState


class FedAvgOptions(Settings):
    """Settings of the algorithm `fedavg` below `federation.strategy`."""

    server_lr: float = Field(default=1.0, gt=0, description="server learning rate η; 1: the mean")


class FedAvg(Algorithm):
    """Federated averaging: the model moves by the learning rate times the clients' mean update.

    Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", Algorithm 1, where the server learning rate is 1.
    """

    name: ClassVar[str] = "fedavg"
    description: ClassVar[str] = "federated averaging (McMahan et al. 2017)"
    Options: ClassVar[type[Settings]] = FedAvgOptions
    options: Any

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the global model moved towards the clients' mean model."""
        model, rate = dict(update.mean), self.options.server_lr
        if rate != 1.0:
            model |= {n: x + rate * (model[n] - x) for n, x in self.trained(state)}
        return state.with_model(model)

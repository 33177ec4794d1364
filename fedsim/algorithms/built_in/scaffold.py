"""SCAFFOLD (with DP-SGD: DP-SCAFFOLD): control variates against the drift of clients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, ClientRule, Sent, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from fedsim.algorithms.state import Arrays, ServerState

CORRECTION = "correction"


class ScaffoldOptions(Settings):
    """`federation.strategy` of `scaffold`."""

    server_lr: float = Field(default=1.0, gt=0, description="server learning rate η")


class CorrectionRule(ClientRule):
    """Adds SCAFFOLD's correction to the gradient: g ← g + c − c_k."""

    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Add the correction that the server sent to the gradient."""
        gradient.add_(sent[CORRECTION])


class Scaffold(Algorithm):
    """Corrects each client's gradients by c − c_k, an estimate of all clients' mean minus its own.

    In K steps of size η_l client k goes from x to y. By the paper's option II its next control
    variate is the mean of its gradients, c_k' = c_k − c + (x − y) / (K η_l), and c changes by
    the mean change times participants / N. The server knows all of these values but y. So the
    server keeps all c_k and sends c − c_k, and a client uploads only its model.

    Guarantee: the uploads are those of FedAvg. Control variates are functions of earlier uploads,
    which were charged with local trust, so they cost no ε. Where the privacy unit is the client,
    only the clipped and noisy update is released. The change of a control variate is not released
    beside it, as it would be a linear function of the same update.

    Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning", Algorithm 1; Noble, Bellet, Dieuleveut 2022, "Differentially Private Federated
    Learning on Heterogeneous Data", Algorithm 1.
    """

    name: ClassVar[str] = "scaffold"
    description: ClassVar[str] = (
        "control variates against the drift of clients (Karimireddy et al. 2020); with privacy "
        "DP-SCAFFOLD (Noble et al. 2022)"
    )
    Options: ClassVar[type[Settings]] = ScaffoldOptions
    wire: ClassVar[tuple[Sent, ...]] = (Sent(CORRECTION, "clients", "post_processing"),)
    uses_each_update: ClassVar[bool] = True
    needs_plain_sgd: ClassVar[bool] = True
    options: ScaffoldOptions

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state with c = 0 and c_k = 0 for all clients."""
        control = {name: x * 0.0 for name, x in self.trained(state)}
        clients = self.training.num_clients
        rows = {
            name: value[None].astype(state.values[name].dtype).repeat(clients, 0)
            for name, value in control.items()
        }
        return state.with_memory(control, rows)

    def client(self) -> ClientRule:
        """Return the rule that corrects gradients."""
        return CorrectionRule()

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return c − c_k, in the dtypes of the model."""
        client_controls = state.client_memory
        return {
            CORRECTION: {
                name: (c - client_controls[name][client]).astype(client_controls[name].dtype)
                for name, c in state.memory.items()
            }
        }

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the global model x + η Δ, and with the next control variates."""
        model, rate = dict(update.mean), self.options.server_lr
        step_size = self.training.learning_rate(state.round_number + 1)
        control, clients = dict(state.memory), dict(state.client_memory)
        for name, x in self.trained(state):
            rows, c = clients[name].copy(), control[name]
            for k, contribution in enumerate(update.contributions):
                if contribution.steps:
                    moved = (x - update.models[name][k]) / (contribution.steps * step_size)
                    change = moved - c
                    rows[contribution.client] += change.astype(rows.dtype)
                    control[name] = control[name] + change / len(rows)
            clients[name] = rows
            model[name] = x + rate * (model[name] - x)
        return state.with_model(model).with_memory(control, clients)

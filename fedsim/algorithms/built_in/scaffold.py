"""SCAFFOLD (DP-SCAFFOLD with DP-SGD): control variates that reduce client drift."""

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
    """Settings of the algorithm `scaffold` below `federation.strategy`."""

    server_lr: float = Field(default=1.0, gt=0, description="server learning rate η")


class CorrectionRule(ClientRule):
    """Rule that adds to each gradient the global control variate minus the client's own one."""

    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Add to `gradient`, in place, the difference of control variates that the server sent."""
        gradient.add_(sent[CORRECTION])


class Scaffold(Algorithm):
    """Correction of client drift: client k adds c − c_k to each gradient.

    The control variate c_k estimates the mean gradient of client k, and c that of all N clients. In
    K steps of size η_l the client goes from x to y. By the paper's option II its next control
    variate is c_k' = c_k − c + (x − y) / (K η_l). Then c changes by the sum of c_k' − c_k over the
    clients of the round, divided by N. The server computes every c_k' from the uploaded y. So the
    server keeps every c_k and sends c − c_k, and a client uploads only its model y.

    Guarantee: the uploads are those of FedAvg. Control variates depend only on earlier uploads,
    which were charged under local trust, so they cost no ε. If the privacy unit is the client, only
    the clipped and noisy update is released. No second release is needed for the control variate,
    which is a linear function of that update.

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
        """Return the initial state, with every control variate set to 0."""
        control = {name: x * 0.0 for name, x in self.trained(state)}
        clients = self.training.num_clients
        rows = {
            name: value[None].astype(state.values[name].dtype).repeat(clients, 0)
            for name, value in control.items()
        }
        return state.with_memory(control, rows)

    def client(self) -> ClientRule:
        """Return the rule that adds the difference c − c_k of control variates to each gradient."""
        return CorrectionRule()

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return the global control variate minus the client's own, in the dtypes of the model."""
        client_controls = state.client_memory
        return {
            CORRECTION: {
                name: (c - client_controls[name][client]).astype(client_controls[name].dtype)
                for name, c in state.memory.items()
            }
        }

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the next global model and the next control variates."""
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

"""MR-MTL: each client has a personal model, pulled towards the mean of all clients' models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, ClientRule, Sent, Update
from fedsim.algorithms.built_in.fedprox import PullRule
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from fedsim.algorithms.state import Arrays, ServerState

CENTER = "center"
UPLOADED = "clients that uploaded"


class MrMtlOptions(Settings):
    """Settings of the algorithm `mr_mtl` below `federation.strategy`."""

    mean_weight: float = Field(
        default=1.0,
        ge=0,
        description="λ of the penalty λ/2 · ‖own model − mean of all clients' models‖²; 0: "
        "local_only",
    )


class MrMtl(Algorithm):
    """Mean-regularised multi-task learning: client k minimises its loss + λ/2 ‖w_k − w̄‖².

    Client k starts each round from its personal model w_k and uploads w_k after its local steps.
    The global model w̄ is the mean over the latest uploads of all clients that have uploaded.
    With λ = 0 each client trains alone; λ → ∞ is FedAvg.

    Guarantee: uploads and charges are those of FedAvg. Under local trust the server knows every
    w_k, because each is a charged upload. So starting from w_k, w̄ and the penalty's gradient are
    post-processing and cost no ε. A personal model is itself an upload, whose charge covers it.

    Source: Liu, Hu, Wu, Smith 2022, "On Privacy and Personalization in Cross-Silo Federated
    Learning", Algorithm 1.
    """

    name: ClassVar[str] = "mr_mtl"
    description: ClassVar[str] = (
        "a model for each client, pulled towards the mean of all (Liu et al. 2022)"
    )
    Options: ClassVar[type[Settings]] = MrMtlOptions
    wire: ClassVar[tuple[Sent, ...]] = (Sent(CENTER, "clients", "post_processing"),)
    takes_weights: ClassVar[bool] = False
    uses_each_update: ClassVar[bool] = True
    keeps_client_models: ClassVar[bool] = True
    options: MrMtlOptions

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state with the initial model as mean model and as every personal model."""
        clients = self.training.num_clients
        center = dict(self.trained(state))
        rows = {name: state.values[name][None].repeat(clients, 0) for name in center}
        uploaded = next(iter(center.values())).ravel()[:1].repeat(clients) * 0.0
        return state.with_memory(center, {**rows, UPLOADED: uploaded})

    def client(self) -> ClientRule | None:
        """Return the rule that adds the gradient of the penalty λ/2 ‖w_k − w̄‖²."""
        return PullRule(self.options.mean_weight, CENTER)

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return the mean model w̄, cast to the dtypes of the global model."""
        return {
            CENTER: {
                name: center.astype(state.values[name].dtype)
                for name, center in state.memory.items()
            }
        }

    def start(self, state: "ServerState", client: int) -> "Arrays":
        """Return the client's personal model; untrained arrays are those of the global model."""
        return self._model_of(state, client)

    def scored_models(self, state: "ServerState") -> "list[Arrays]":
        """Return every client's personal model."""
        return [self._model_of(state, client) for client in range(self.training.num_clients)]

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the uploads as personal models and their mean as global model."""
        center, clients = dict(state.memory), dict(state.client_memory)
        places = [contribution.client for contribution in update.contributions]
        clients[UPLOADED] = clients[UPLOADED].copy()
        clients[UPLOADED][places] = 1.0
        known = clients[UPLOADED] > 0.0
        model: dict[str, np.ndarray] = dict(update.mean)
        for name in center:
            clients[name] = clients[name].copy()
            clients[name][places] = update.models[name]
            center[name] = clients[name][known].mean(axis=0, dtype="float64")
            model[name] = center[name]
        return state.with_model(model).with_memory(center, clients)

    def _model_of(self, state: "ServerState", client: int) -> "Arrays":
        client_values = {name: state.client_memory[name][client] for name in state.memory}
        return {**state.values, **client_values}

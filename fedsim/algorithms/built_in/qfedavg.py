"""q-FedAvg: clients with a larger loss get a larger weight in the average update."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, Sent, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState

LOSS = "loss"


class QFedAvgOptions(Settings):
    """Settings of the algorithm `qfedavg` below `federation.strategy`."""

    q: float = Field(default=1.0, ge=0, description="fairness q; 0: FedAvg of equal weights")


class QFedAvg(Algorithm):
    """Weighting by loss: x ← x − Σ F_k^q Δ_k / Σ (q F_k^(q−1) ‖Δ_k‖² + L F_k^q).

    x is the global model, y_k the model of client k, and q the option `q`. 1 / L is the learning
    rate of local steps, and Δ_k = L (x − y_k). F_k is the loss of x on all examples of client k,
    which the client sends. The loss is computed from private examples without noise, so this
    algorithm cannot be used with `privacy`.

    Source: Li et al. 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2.
    """

    name: ClassVar[str] = "qfedavg"
    description: ClassVar[str] = "clients with a larger loss count for more (Li et al. 2020)"
    Options: ClassVar[type[Settings]] = QFedAvgOptions
    wire: ClassVar[tuple[Sent, ...]] = (Sent(LOSS, "server", "private", "number"),)
    takes_weights: ClassVar[bool] = False
    uses_each_update: ClassVar[bool] = True
    options: QFedAvgOptions

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state after the loss-weighted step (see the class); buffers are averaged."""
        q = self.options.q
        smooth = 1.0 / self.training.learning_rate(state.round_number + 1)
        trained, total = self.trained(state), 0.0
        steps = {name: x * 0.0 for name, x in trained}
        for k, contribution in enumerate(update.contributions):
            loss = max(contribution.numbers[LOSS], 1e-10)
            moves = {name: smooth * (x - update.models[name][k]) for name, x in trained}
            square = sum(float((move**2).sum()) for move in moves.values())
            total += q * loss ** (q - 1) * square + smooth * loss**q
            for name, move in moves.items():
                steps[name] = steps[name] + loss**q * move
        model = dict(update.mean) | {name: x - steps[name] / total for name, x in trained}
        return state.with_model(model)

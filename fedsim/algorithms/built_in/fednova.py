"""FedNova: updates are normalised, so that more local steps give a client no larger weight."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.algorithm import Algorithm, Contribution, Update
from fedsim.algorithms.built_in.fedavg import FedAvgOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState


class FedNova(Algorithm):
    """Average of normalised updates: x ← x − η τ Σ p_k d_k, with τ = Σ p_k a_k.

    x is the global model, y_k client k's model, η the server learning rate, and d_k = (x − y_k) /
    a_k the normalised update. p_k is the client's weight over the sum of weights. a_k is the L1
    norm of the coefficients with which the client's gradients enter its update. K_k steps of SGD
    with momentum ρ have a_k = (K_k − ρ (1 − ρ^K_k) / (1 − ρ)) / (1 − ρ); without momentum a_k =
    K_k. So the update is the mean with weights p_k / a_k, times τ Σ p_k / a_k. With equal steps
    this is FedAvg's update.

    Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization", equations 8 and 9 and section 4.1.
    """

    name: ClassVar[str] = "fednova"
    description: ClassVar[str] = "updates normalised by the clients' local steps (Wang et al. 2020)"
    Options: ClassVar[type[Settings]] = FedAvgOptions
    weighs_steps: ClassVar[bool] = True
    options: FedAvgOptions

    def weight(self, contribution: Contribution) -> float:
        """Return 1 / a_k, where a_k measures how much local work client k did (see the class)."""
        return 1.0 / self._norm(contribution)

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the global model after the normalised step (see the class)."""
        total = sum(contribution.weight for contribution in update.contributions)
        shares = [
            (contribution.weight / total, self._norm(contribution))
            for contribution in update.contributions
        ]
        steps = sum(p * a for p, a in shares)
        gain = self.options.server_lr * steps * sum(p / a for p, a in shares)
        model = dict(update.mean)
        model |= {name: x + gain * (model[name] - x) for name, x in self.trained(state)}
        return state.with_model(model)

    def _norm(self, contribution: Contribution) -> float:
        steps, rho = max(1, contribution.steps), self.training.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

"""Server optimizers, which use the mean update of the clients as a gradient at the server.

Notation of Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2: x is the global
model, Δ the weighted mean of the clients' models minus x, m and v the moments, η the server's
learning rate and τ its adaptivity. A step is computed from the aggregate alone, in float64, one
value at a time. It is post-processing of the uploads and changes no ε.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from fedsim.algorithms.state import Arrays, ServerState


class ServerOptimizer(Algorithm):
    """Base class of algorithms whose server takes an optimizer step along Δ.

    The moments are in the state's memory, by the names `m/NAME` and `v/NAME`. Only trained
    parameters take the step. Other arrays, such as the statistics of BatchNorm, become the mean, as
    a variance could become negative after a step.

    Attributes:
        moments: the names of the moments, one letter each.
    """

    moments: ClassVar[str] = "mv"

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state with the initial moments of every trained parameter."""
        memory = {
            f"{moment}/{name}": x * 0.0 + self.initial(moment)
            for name, x in self.trained(state)
            for moment in self.moments
        }
        return state.with_memory(memory)

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the global model x + step, and the next moments."""
        model, memory = dict(update.mean), dict(state.memory)
        for name, x in self.trained(state):
            moments = {moment: state.memory[f"{moment}/{name}"] for moment in self.moments}
            step, moments = self.step(model[name] - x, moments)
            model[name] = x + step
            memory |= {f"{moment}/{name}": value for moment, value in moments.items()}
        return state.with_model(model).with_memory(memory)

    def initial(self, moment: str) -> float:
        """Return the value of a moment before the first round."""
        return 0.0

    @abstractmethod
    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return the optimizer step of one parameter, and the parameter's next moments.

        Args:
            delta: Δ of the parameter, float64, in the parameter's shape.
            moments: the parameter's moments by name.
        """


class AdaptiveOptions(Settings):
    """`federation.strategy` of `fedadam` and `fedyogi`."""

    server_lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


class AdaptiveOptimizer(ServerOptimizer):
    """Base class of adaptive optimizers: m ← β₁ m + (1 − β₁) Δ, x ← x + η m / (√v + τ).

    Subclasses update v, which starts at τ². As in the paper, the moments' bias in the first rounds
    is not corrected.
    """

    options: Any

    def initial(self, moment: str) -> float:
        """Return the initial value of a moment: 0 for m, τ² for v."""
        return self.options.tau**2 if moment == "v" else 0.0

    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return the step η m / (√v + τ), and the next m and v."""
        beta, tau = self.options.beta_1, self.options.tau
        m = beta * moments["m"] + (1 - beta) * delta
        v = self.second_moment(moments["v"], delta**2)
        return self.options.server_lr * m / (v**0.5 + tau), {"m": m, "v": v}

    @abstractmethod
    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next second moment v of a parameter.

        Args:
            v: the second moment before the round.
            square: Δ², in the shape of v.
        """

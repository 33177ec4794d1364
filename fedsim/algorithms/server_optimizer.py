"""Server optimizers: the mean change of the clients' models is a gradient of the server.

Notation of Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2: x is the global
model, Δ the weighted mean of the clients' models minus x, m and v the moments, η the server's
learning rate and τ its adaptivity. All of it is computed from the aggregate alone, in float64, one
value at a time: post-processing of the uploads, which changes no ε.
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
    """An algorithm that takes a step along Δ; its moments are its memory, `m/NAME` and `v/NAME`.

    Trained parameters take the step. Other arrays, such as the statistics of BatchNorm, take the
    mean: a step along a variance may end below zero.
    """

    moments: ClassVar[str] = "mv"

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state with the first moments of every trained parameter."""
        memory = {
            f"{moment}/{name}": x * 0.0 + self.initial(moment)
            for name, x in self.trained(state)
            for moment in self.moments
        }
        return state.with_memory(memory)

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with x + step and the next moments."""
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
        """Return the step of one array, and its next moments.

        Args:
            delta: Δ, float64, in the array's shape.
            moments: its moments by name.
        """


class AdaptiveOptions(Settings):
    """`federation.strategy` of `fedadam` and `fedyogi`."""

    server_lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


class AdaptiveOptimizer(ServerOptimizer):
    """Algorithm 2: m ← β₁ m + (1 − β₁) Δ, v by the optimizer, x ← x + η m / (√v + τ).

    v starts at τ². As in the paper, the moments' bias in the first rounds is not corrected.
    """

    options: Any

    def initial(self, moment: str) -> float:
        """Return 0 for m, and τ² for v."""
        return self.options.tau**2 if moment == "v" else 0.0

    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return η m / (√v + τ)."""
        beta, tau = self.options.beta_1, self.options.tau
        m = beta * moments["m"] + (1 - beta) * delta
        v = self.second_moment(moments["v"], delta**2)
        return self.options.server_lr * m / (v**0.5 + tau), {"m": m, "v": v}

    @abstractmethod
    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next v.

        Args:
            v: the last one.
            square: Δ².
        """

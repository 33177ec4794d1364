"""Server optimizers: algorithms that use the clients' mean update as a gradient.

Notation of Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2: x is the global
model, and Δ is the weighted mean of the clients' models minus x. The moments are m and v, η is the
server's learning rate, and τ is its adaptivity. A step uses only the aggregate, in float64, value
by value. It is post-processing of the uploads and changes no ε.
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
    """Base class of algorithms whose server takes an optimizer step along the mean update Δ.

    The moments m and v of parameter NAME are kept in `ServerState.memory` as `m/NAME` and `v/NAME`.
    Only trained parameters take the step. Other arrays, such as the statistics of BatchNorm, become
    the clients' mean: a step could make a variance negative.

    Attributes:
        moments: the names of the moments, one letter each.
    """

    moments: ClassVar[str] = "mv"

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state with the initial moments of every trained parameter added."""
        memory = {
            f"{moment}/{name}": x * 0.0 + self.initial(moment)
            for name, x in self.trained(state)
            for moment in self.moments
        }
        return state.with_memory(memory)

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the global model after the optimizer step, and the next moments."""
        model, memory = dict(update.mean), dict(state.memory)
        for name, x in self.trained(state):
            moments = {moment: state.memory[f"{moment}/{name}"] for moment in self.moments}
            step, moments = self.step(model[name] - x, moments)
            model[name] = x + step
            memory |= {f"{moment}/{name}": value for moment, value in moments.items()}
        return state.with_model(model).with_memory(memory)

    def initial(self, moment: str) -> float:
        """Return the value of the moment `m` or `v` before the first round."""
        return 0.0

    @abstractmethod
    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return the optimizer step of one parameter, and the parameter's next moments.

        Args:
            delta: the mean update of the parameter, float64, in the parameter's shape.
            moments: the parameter's moments by name.
        """


class AdaptiveOptions(Settings):
    """Settings of `fedadam` and `fedyogi` below `federation.strategy`."""

    server_lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


class AdaptiveOptimizer(ServerOptimizer):
    """Base class of the adaptive server optimizers of Reddi et al. 2021, such as fedyogi.

    With mean update Δ the step is m ← β₁ m + (1 − β₁) Δ, x ← x + η m / (√v + τ). x is the global
    model, m and v are the moments, β₁ is the option `beta_1`, η the server learning rate, and τ the
    option `tau`. Subclasses update v, which starts at τ². As in Reddi et al. 2021, the bias of the
    moments in the first rounds is not corrected.
    """

    options: Any

    def initial(self, moment: str) -> float:
        """Return the initial value of a moment: 0 for m, τ² for v, where τ is the option `tau`."""
        return self.options.tau**2 if moment == "v" else 0.0

    def step(self, delta: "np.ndarray", moments: "Arrays") -> "tuple[np.ndarray, Arrays]":
        """Return the step η m / (√v + τ) of one parameter, and its next moments m and v.

        η is the server learning rate, and τ is the option `tau`.
        """
        beta, tau = self.options.beta_1, self.options.tau
        m = beta * moments["m"] + (1 - beta) * delta
        v = self.second_moment(moments["v"], delta**2)
        return self.options.server_lr * m / (v**0.5 + tau), {"m": m, "v": v}

    @abstractmethod
    def second_moment(self, v: "np.ndarray", square: "np.ndarray") -> "np.ndarray":
        """Return the next second moment v of a parameter.

        Args:
            v: the second moment before the round.
            square: the squared mean update Δ², in the shape of v.
        """

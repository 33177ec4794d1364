"""Server optimizers: the mean change of the clients' models is a gradient of the server.

Notation of Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2: x is the global
model, Δ the weighted mean of the clients' models minus x, m and v the moments, η the server's
learning rate and τ its adaptivity. All of it is computed from the aggregate alone, in float64, one
value at a time: post-processing of the uploads, which changes no ε.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord

from fedsim.core.settings import Settings
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.server.aggregation.strategies import Strategy
from fedsim.server.aggregation.strategy_settings import (
    FedAdagradSettings,
    FedAdamSettings,
    FedAvgMSettings,
)
from fedsim.server.state import ServerState

Moments = Mapping[str, np.ndarray]


class ServerOptimizer(Strategy):
    """A strategy that takes a step along Δ; its moments are the optimizer's state.

    Trained parameters take the step. Other arrays, such as the statistics of BatchNorm, take the
    mean: a step along a variance may end below zero.
    """

    def update(
        self, state: ServerState, aggregate: ArrayRecord
    ) -> tuple[ArrayRecord, Mapping[str, np.ndarray]]:
        """Return x + step, and the moments as `m/NAME` and `v/NAME`, float64."""
        start, model, optimizer = to_numpy(state.arrays), dict(to_numpy(aggregate)), {}
        for name in model.keys() & self.parameters:
            x = start[name].astype(np.float64)
            moments = {one: state.optimizer.get(f"{one}/{name}", self.initial(one)) for one in "mv"}
            step, moments = self.step(model[name] - x, moments)
            model[name] = (x + step).astype(start[name].dtype)
            optimizer |= {f"{one}/{name}": value for one, value in moments.items()}
        return to_arrays(model), dict(sorted(optimizer.items()))

    def initial(self, moment: str) -> np.ndarray:
        """Return the value of a moment before the first round."""
        return np.zeros(())

    @abstractmethod
    def step(self, delta: np.ndarray, moments: Moments) -> tuple[np.ndarray, Moments]:
        """Return the step of one array, and its next moments.

        Args:
            delta: Δ, float64, in the array's shape.
            moments: its moments `m` and `v`, before the first round scalars.
        """


class FedAvgM(ServerOptimizer):
    """FedAvg with momentum: m ← β m + Δ, x ← x + η m.

    Source: Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", section 4.3.
    """

    Options: ClassVar[type[Settings]] = FedAvgMSettings
    options: FedAvgMSettings

    def step(self, delta: np.ndarray, moments: Moments) -> tuple[np.ndarray, Moments]:
        """Return η m."""
        m = self.options.momentum * moments["m"] + delta
        return self.options.lr * m, {"m": m}


class _Adaptive(ServerOptimizer):
    """Algorithm 2: m ← β₁ m + (1 − β₁) Δ, v by the optimizer, x ← x + η m / (√v + τ).

    v starts at τ². As in the paper, the moments' bias in the first rounds is not corrected.
    """

    def initial(self, moment: str) -> np.ndarray:
        """Return 0 for m, and τ² for v."""
        return np.array(self.options.tau**2 if moment == "v" else 0.0)

    def step(self, delta: np.ndarray, moments: Moments) -> tuple[np.ndarray, Moments]:
        """Return η m / (√v + τ)."""
        beta, tau = self.options.beta_1, self.options.tau
        m = beta * moments["m"] + (1 - beta) * delta
        v = self.second_moment(moments["v"], delta**2)
        return self.options.lr * m / (np.sqrt(v) + tau), {"m": m, "v": v}

    @abstractmethod
    def second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        """Return the next v.

        Args:
            v: the last one.
            square: Δ².
        """


class FedAdagrad(_Adaptive):
    """Adagrad at the server: v ← v + Δ²."""

    Options: ClassVar[type[Settings]] = FedAdagradSettings
    options: FedAdagradSettings

    def second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        """Return v + Δ²."""
        return v + square


class FedAdam(_Adaptive):
    """Adam at the server: v ← β₂ v + (1 − β₂) Δ²."""

    Options: ClassVar[type[Settings]] = FedAdamSettings
    options: FedAdamSettings

    def second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        """Return β₂ v + (1 − β₂) Δ²."""
        beta = self.options.beta_2
        return beta * v + (1 - beta) * square


class FedYogi(_Adaptive):
    """Yogi at the server: v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    Options: ClassVar[type[Settings]] = FedAdamSettings
    options: FedAdamSettings

    def second_moment(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        """Return v − (1 − β₂) Δ² sign(v − Δ²)."""
        return v - (1 - self.options.beta_2) * square * np.sign(v - square)

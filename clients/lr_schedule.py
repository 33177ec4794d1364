"""Schedules of the local learning rate by the number of the round: public, and free of ε.

Names and formulas are those of `torch.optim.lr_scheduler`, with rounds in place of epochs. The
first round after the warmup has t = 0, the round after it t = 1. A schedule stays at its end.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from fedsim.core.limits import MAX_ROUNDS
from fedsim.core.settings import Settings

_Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
_Factor = Annotated[float, Field(gt=0, le=1)]


class _Schedule(Settings):
    """A learning rate that follows the number of the round."""

    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_ROUNDS,
        description="rounds before the schedule begins, in which the learning rate grows linearly: "
        "lr · r / (warmup + 1) in round r",
    )

    def rate(self, lr: float, round_number: int) -> float:
        """Return the learning rate of a round.

        Args:
            lr: `local.optimizer.lr`.
            round_number: the round ≥ 1.
        """
        if round_number <= self.warmup:
            return lr * round_number / (self.warmup + 1)
        return self.after_warmup(lr, round_number - self.warmup - 1)

    @abstractmethod
    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup.

        Args:
            lr: `local.optimizer.lr`.
            t: rounds since the warmup, from 0.
        """


class ConstantLr(_Schedule):
    """lr · factor for `total_iters` rounds, then lr; as `ConstantLR`."""

    name: Literal["constant"] = Field(description="the schedule")
    factor: _Factor = Field(default=1.0, description="factor of the first total_iters rounds")
    total_iters: _Rounds = Field(default=5, description="rounds with the factor")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.factor if t < self.total_iters else lr


class StepLr(_Schedule):
    """lr · gamma^⌊t / step_size⌋; as `StepLR`."""

    name: Literal["step"] = Field(description="the schedule")
    step_size: _Rounds = Field(description="rounds between two decays")
    gamma: _Factor = Field(default=0.1, description="factor of a decay")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.gamma ** (t // self.step_size)


class ExponentialLr(_Schedule):
    """lr · gamma^t; as `ExponentialLR`."""

    name: Literal["exponential"] = Field(description="the schedule")
    gamma: _Factor = Field(description="factor of each round")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.gamma**t


class LinearLr(_Schedule):
    """lr · a factor that goes from start_factor to end_factor in `total_iters`; as `LinearLR`."""

    name: Literal["linear"] = Field(description="the schedule")
    start_factor: _Factor = Field(default=1.0, description="factor of the first round")
    end_factor: _Factor = Field(default=0.1, description="factor after total_iters rounds")
    total_iters: _Rounds = Field(description="rounds from the first factor to the last")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        share = min(t, self.total_iters) / self.total_iters
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


class CosineLr(_Schedule):
    """From lr to eta_min by half a cosine in `T_max` rounds; as `CosineAnnealingLR`."""

    name: Literal["cosine"] = Field(description="the schedule")
    T_max: _Rounds = Field(description="rounds from lr to eta_min; then it stays")
    eta_min: float = Field(default=0.0, ge=0, description="learning rate after T_max rounds")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        if t >= self.T_max:
            return self.eta_min
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * t / self.T_max)) / 2


LrSchedule = ConstantLr | StepLr | ExponentialLr | LinearLr | CosineLr
"""The schedules; `name` tells them apart."""

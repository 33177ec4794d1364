"""Local optimizers SGD and Adam, which update each value of a list of tensors independently.

Results are bitwise equal to those of torch.optim. An optimizer uses only parameters and gradients,
so the same code trains one client or stacked parameters of several. (Building torch's optimizer
takes longer than a step of a small model, and about a second the first time.)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.clients.local_settings import AdamSettings, OptimizerSettings, SgdSettings

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class LocalOptimizer(ABC):
    """Base class of the optimizers of local training, which update parameters in place."""

    @abstractmethod
    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten.

        Args:
            values: the parameters, detached; they must be the same tensors in every step.
            gradients: gradient of each parameter, in the parameter's shape.
        """


class Sgd(LocalOptimizer):
    """SGD as torch.optim.SGD without dampening: v ← μ v + (g + λ w), w ← w − η v.

    w is the parameter, g its gradient, μ the momentum, λ the weight decay and η the learning rate.
    """

    def __init__(self, settings: SgdSettings) -> None:
        self._settings = settings
        self._velocities: list[Tensor] | None = None

    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten."""
        settings = self._settings
        if settings.weight_decay:
            for value, gradient in zip(values, gradients, strict=True):
                gradient.add_(value, alpha=settings.weight_decay)
        if settings.momentum:
            if self._velocities is None:
                self._velocities = [gradient.clone() for gradient in gradients]
            else:
                for velocity, gradient in zip(self._velocities, gradients, strict=True):
                    velocity.mul_(settings.momentum).add_(gradient)
            gradients = self._velocities
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-settings.lr)


class Adam(LocalOptimizer):
    """Optimizer Adam (Kingma and Ba 2015), or AdamW with decoupled weight decay, as in torch."""

    def __init__(self, settings: AdamSettings) -> None:
        self._settings = settings
        self._steps = 0
        self._moments: list[tuple[Tensor, Tensor]] = []

    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update the parameters in place by one step; `gradients` may be overwritten."""
        if not self._moments:
            self._moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
        self._steps += 1
        corrections = [1 - beta**self._steps for beta in _BETAS]
        settings = self._settings
        for value, gradient, (first, second) in zip(values, gradients, self._moments, strict=True):
            if settings.weight_decay and settings.name == "adamw":
                value.mul_(1 - settings.lr * settings.weight_decay)
            elif settings.weight_decay:
                gradient.add_(value, alpha=settings.weight_decay)
            first.lerp_(gradient, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            scale = (second.sqrt() / math.sqrt(corrections[1])).add_(_EPSILON)
            value.addcdiv_(first, scale, value=-settings.lr / corrections[0])


def make_optimizer(settings: OptimizerSettings) -> LocalOptimizer:
    """Create the optimizer that the settings name, without momentum or state of earlier rounds."""
    return Sgd(settings) if isinstance(settings, SgdSettings) else Adam(settings)

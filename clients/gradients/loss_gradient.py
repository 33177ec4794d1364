"""Losses that know their gradient at the outputs, which saves a backward pass of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

_Loss = Callable[[Tensor, Tensor], Tensor]


class KnownGradient(Protocol):
    """A loss that knows its gradient without a backward pass of torch."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient at the outputs (n, ...) of the sum of weighted losses."""
        ...


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return the loss if it knows its gradient."""
    # To ask for an instance of a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None


@dataclass(frozen=True)
class _ScaledLoss:
    """A loss times a constant."""

    loss: _Loss
    factor: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * self.loss(outputs, targets)


@dataclass(frozen=True)
class _ScaledKnownLoss(_ScaledLoss):
    """The same for a loss that knows its gradient."""

    known: KnownGradient

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient at the outputs (n, ...) of the sum of weighted losses."""
        return self.factor * self.known.output_gradient(outputs, targets, weights)


def scaled_loss(loss: _Loss, factor: float) -> _Loss:
    """Return a loss times a constant; its gradients are computed in the same way.

    Args:
        loss: one value per example.
        factor: the constant.
    """
    known = known_gradient(loss)
    return _ScaledLoss(loss, factor) if known is None else _ScaledKnownLoss(loss, factor, known)

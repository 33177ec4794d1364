"""How much one example may contribute to a step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding in float32 may lift a norm by a few units in the last place; the bound leaves room.
_ROUNDING_ROOM = 1.0 - 1e-6


@dataclass(frozen=True)
class FlatClipping:
    """Scale each example's whole gradient to an L2 norm of at most `max_grad_norm` (C).

    Guarantee: an example's contribution `coefficient * gradient` has an L2 norm ≤ C, so adding or
    removing an example changes the sum by at most C. An example whose gradient is not finite
    contributes exactly zero.

    Edge cases: norm 0 keeps the zero gradient; C = ∞ clips nothing.
    """

    max_grad_norm: float

    def coefficients(self, norms: Tensor) -> Tensor:
        """Return each example's factor from the norms of the gradients, both float64 (n,)."""
        finite = torch.isfinite(norms)
        if math.isinf(self.max_grad_norm):
            return finite.to(norms.dtype)
        bound = self.max_grad_norm * _ROUNDING_ROOM
        factors = torch.where(norms > bound, bound / norms, torch.ones_like(norms))
        return torch.where(finite, factors, torch.zeros_like(norms))

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum to adding, removing or zeroing one example."""
        return self.max_grad_norm

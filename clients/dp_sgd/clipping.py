"""How much one example may contribute to a step, in all and by group of parameters."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.parameters import FlatParameters

# Rounding in float32 may lift a norm by a few units in the last place; the bound leaves room.
_ROUNDING_ROOM = 1.0 - 1e-6


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of parameters, each with an L2 bound of its own.

    Attributes:
        members: the parameter indices of each group; together all parameters.
        bounds: C_m, the L2 bound of one example's gradient in each group.
    """

    members: tuple[tuple[int, ...], ...]
    bounds: tuple[float, ...]

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum to adding, removing or zeroing one example."""
        return math.hypot(*self.bounds)


class Clipping(ABC):
    """Bounds each example's contribution.

    Guarantee: in each group m, an example's contribution `coefficient * gradient` has an L2 norm of
    at most C_m, so adding or removing an example changes the sum by at most C_m there and by at
    most `Groups.sensitivity` in all. An example whose gradient is not finite contributes exactly
    zero.
    """

    @abstractmethod
    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups and their bounds for a model."""

    @abstractmethod
    def coefficients(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """Return the factors (n, m) for gradient norms (n, m), float64, given bounds (m,)."""


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """Scale each example's whole gradient to an L2 norm of at most `max_grad_norm` (C).

    Edge cases: norm 0 keeps the zero gradient; C = ∞ clips nothing.
    """

    max_grad_norm: float

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return one group of all parameters."""
        return Groups((tuple(range(len(parameters.tensors))),), (self.max_grad_norm,))

    def coefficients(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """Return min(1, C / norm), and 0 where the norm is not finite."""
        return clipped(norms, bounds)


def clipped(norms: Tensor, bounds: Tensor) -> Tensor:
    """Return min(1, C_m / norm) for norms (n, m) and bounds (m,), 0 where a norm is not finite."""
    room = bounds * _ROUNDING_ROOM
    factors = torch.where(norms > room, room / norms, 1.0)
    return torch.where(torch.isfinite(norms).all(1, keepdim=True), factors, 0.0)

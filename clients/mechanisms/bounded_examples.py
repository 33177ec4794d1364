"""Public bounds of examples, and examples within them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.mechanisms.kinds import LossName


@dataclass(frozen=True)
class BoundedExamples:
    """Sizes and bounds of an example.

    Attributes:
        loss: name of the loss, which says what a target is: a class, k labels in [0, 1], or k
            numbers.
        features: d, values of an example's features.
        targets: k: classes, labels or numbers.
        max_feature_norm: R, L2 bound of features.
        max_target_norm: Y, L2 bound of the numbers of mse; None for the other losses.

    Raises:
        ValueError: mse without a bound of the targets.
    """

    loss: LossName
    features: int
    targets: int
    max_feature_norm: float
    max_target_norm: float | None = None

    def __post_init__(self) -> None:
        if (self.loss == "mse") != (self.max_target_norm is not None):
            needs = "needs" if self.loss == "mse" else "has no use for"
            raise ValueError(f"loss {self.loss} {needs} max_target_norm, the bound of a target")

    @property
    def target_norm(self) -> float:
        """L2 bound of the row of a target."""
        match self.loss:
            case "cross_entropy":
                return 1.0
            case "bce":
                return math.sqrt(self.targets)
            case "mse":
                return self.max_target_norm or 0.0

    def target_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets as rows within their bound, float64 (n, k), and which rows have one (n,).

        A class becomes a row with a 1 at its place, or of zeros where it is no class.

        Guarantee: a row depends on the same target alone.

        Args:
            targets: (n,) or (n, k).
        """
        if self.loss == "cross_entropy":
            classes = torch.arange(self.targets, device=targets.device)
            rows = (targets.view(-1, 1) == classes).double()
            return rows, rows.any(dim=1)
        if self.loss == "mse":
            return bounded_rows(targets, self.target_norm)
        rows = targets.double().reshape(len(targets), -1)
        finite = rows.isfinite().all(dim=1)
        return torch.where(finite.unsqueeze(1), rows, 0.0).clamp(0.0, 1.0), finite

    def targets_of(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return the targets that noisy rows stand for, in the shape and type of `like`.

        Args:
            rows: float64 (n, k).
            like: targets (n,) or (n, k).
        """
        if self.loss == "cross_entropy":
            return rows.argmax(dim=1).to(like.dtype)
        if self.loss == "bce":
            rows = (rows > 0.5).double()
        return rows.reshape(like.shape).to(like.dtype)


def bounded_rows(values: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return rows of an L2 norm of at most `bound`, float64 (n, d), and which were finite (n,).

    Guarantee: a row depends on the same row of the values alone; one that is not finite is 0. Its
    norm is at most (1 + (d + 16) 2⁻⁵³) times the bound.

    Args:
        values: (n, ...).
        bound: of the norm.
    """
    rows = values.double().flatten(1) if values.ndim > 1 else values.double().unsqueeze(1)
    finite = rows.isfinite().all(dim=1)
    rows = torch.where(finite.unsqueeze(1), rows, 0.0)
    largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    norms = largest * (rows / largest).square().sum(dim=1, keepdim=True).sqrt()
    return rows * (bound / norms.clamp_min(bound)), finite

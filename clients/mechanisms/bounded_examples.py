"""Public bounds on the norms of examples, and functions that scale examples to the bounds."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.mechanisms.kinds import LossName


@dataclass(frozen=True)
class BoundedExamples:
    """Sizes of an example's features and targets, and public bounds on their L2 norms.

    Attributes:
        loss: name of the loss, which determines the targets: a class (cross_entropy), k labels in
            [0, 1] (bce), or k numbers (mse).
        features: number d of features of an example.
        targets: number k of classes, labels or numbers.
        max_feature_norm: bound R on the L2 norm of the features.
        max_target_norm: bound Y on the L2 norm of the targets of mse; None for the other losses.

    Raises:
        ValueError: mse comes without `max_target_norm`, or another loss comes with it.
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
        """Bound on the L2 norm of each row that `target_rows` returns, one row for each example."""
        match self.loss:
            case "cross_entropy":
                return 1.0
            case "bce":
                return math.sqrt(self.targets)
            case "mse":
                return self.max_target_norm or 0.0

    def target_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounded targets, float64 (n, k), and whether each target is valid, bool (n,).

        A class becomes a one-hot row. A target that is invalid, such as NaN, becomes a row of
        zeros.

        Guarantee: a row depends on the target of the same example alone.

        Args:
            targets: targets of the examples, (n,) or (n, k).
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
        """Convert noisy rows to targets: argmax for a class, rounding for labels, numbers as is.

        Args:
            rows: noisy rows, float64 (n, k).
            like: targets (n,) or (n, k) whose shape and dtype the result gets.
        """
        if self.loss == "cross_entropy":
            return rows.argmax(dim=1).to(like.dtype)
        if self.loss == "bce":
            rows = (rows > 0.5).double()
        return rows.reshape(like.shape).to(like.dtype)


def bounded_rows(values: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return rows clipped to an L2 norm, float64 (n, d), and whether each was finite, bool (n,).

    Guarantee: a row depends on the same row of the values alone; a row that is not finite becomes
    0. The norm of a row is at most (1 + (d + 16) 2⁻⁵³) times the bound.

    Args:
        values: values of n examples (n, ...), d numbers for each example.
        bound: largest L2 norm of a row.
    """
    rows = values.double().flatten(1) if values.ndim > 1 else values.double().unsqueeze(1)
    finite = rows.isfinite().all(dim=1)
    rows = torch.where(finite.unsqueeze(1), rows, 0.0)
    largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    norms = largest * (rows / largest).square().sum(dim=1, keepdim=True).sqrt()
    return rows * (bound / norms.clamp_min(bound)), finite

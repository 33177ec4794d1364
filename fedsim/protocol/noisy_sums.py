"""Noisy sums of updates as integers, and the update rule of adaptive clip norms.

Clients round their clipped contributions to integer multiples of a fixed unit. Then integer noise
is added: each client adds a share of the noise (distributed trust), or the server adds all of it
(central trust). A sum of integers is exact, with or without secure aggregation. Everything after
the noisy sum is post-processing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

CLIP_COUNT = "fedsim.clip-count"
"""Name of the tensor (1,) with the count from which an adaptive `max_update_norm` is updated."""


@dataclass(frozen=True)
class SumPlan:
    """The public parameters of a federation's noisy sums, which are the same in all rounds.

    A client sends one int64 tensor for each trained tensor of the model. The client's update times
    its weight is `unit` times these integers.

    Attributes:
        unit: the value of the integer 1 in an update; it may be negative. The mean update is unit
            times the sum of integers over the sum of weights. With an adaptive clip norm S, unit is
            the value at S = 1 and is multiplied by the S of the round.
        bound: the largest |integer| of one client in one coordinate, including the client's noise.
        shapes: the shape of each trained tensor by name, in the order of the model.
        server_noise: whether the server adds the noise, as one draw for the sum. Otherwise the
            clients add it.
        divisor: a public number that divides the sum if participation is secret. None means that
            the sum is divided by the participants' total weight.
        count_unit: the value of the integer 1 in `CLIP_COUNT`, the sum by which the clip norm is
            adapted; None if the clip norm is fixed.
    """

    unit: float
    bound: int
    shapes: Mapping[str, tuple[int, ...]]
    server_noise: bool
    divisor: float | None = None
    count_unit: float | None = None


MIN_BOUND, MAX_BOUND = 1e-10, 1e10

AdaptiveClipNorm = float | tuple[float, ...]
"""An adaptive clip norm: of the whole gradient or update, or C_m of each group of parameters."""


def whole_bound(bound: AdaptiveClipNorm) -> float:
    """Return the clip norm of the whole gradient; group clip norms C_m give (Σ C_m²)^(1/2)."""
    return math.hypot(*bound) if isinstance(bound, tuple) else bound


@dataclass(frozen=True)
class BoundRule:
    """The update rule of an adaptive clip norm.

    The clip norm after C is C · exp(−η (b̄ − γ)), where b̄ is the noisy fraction of gradients (or
    updates) with a norm of at most C.

    Source: Andrew et al. 2021, arXiv:1905.03871, Algorithm 1.

    Attributes:
        quantile: the target fraction γ of norms that are at most C.
        learning_rate: the learning rate η of the geometric update.

    Raises:
        ValueError: an attribute is outside its range.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate!r}")
        if not 0.0 <= self.quantile <= 1.0:
            raise ValueError(f"quantile must be in [0, 1], got {self.quantile!r}")

    def next_bound(self, bound: float, share: float) -> float:
        """Return the clip norm for the next release.

        Args:
            bound: the clip norm C of the last release.
            share: the noisy fraction b̄ of norms that are at most C; it may be outside [0, 1].
        """
        exponent = -self.learning_rate * (share - self.quantile)
        # Noise may move b̄ far out of [0, 1], so no step changes C by more than a factor e.
        moved = bound * math.exp(min(max(exponent, -1.0), 1.0))
        return min(max(moved, MIN_BOUND), MAX_BOUND)


def check_bound(bound: AdaptiveClipNorm) -> float:
    """Return an adaptive clip norm unchanged if it is valid, and raise an error if it is not.

    Valid is one number from `MIN_BOUND` to `MAX_BOUND`, as `BoundRule.next_bound` returns it.

    Args:
        bound: the clip norm, an L2 norm of gradients or updates.

    Raises:
        ValueError: the clip norm is out of range, or is a tuple with one value for each group of
            parameters.
    """
    if isinstance(bound, tuple):
        raise ValueError(f"the adaptive clip norm must be one number, got {bound!r}")
    if not MIN_BOUND <= bound <= MAX_BOUND:
        raise ValueError(
            f"an adaptive clip norm must be from {MIN_BOUND:g} to {MAX_BOUND:g}, got {bound!r}"
        )
    return bound

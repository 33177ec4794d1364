"""Noisy sums of a round, and the clipping bound that follows one: rules of clients and server.

Clients put their clipped contributions on the grid, and integer noise on top of them: each client a
share of it (distributed trust), or the server all of it (central trust). The sum of integers is
exact, in plain numbers and in a ring. Everything after it is post-processing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

CLIP_COUNT = "fedsim.clip-count"
"""Name of the tensor (1,) that holds the count from which adaptive `max_update_norm` learns."""


@dataclass(frozen=True)
class SumPlan:
    """Public facts of the noisy sums of a federation, the same in all rounds.

    A client sends one int64 tensor for each trained tensor of the model. Its update times its
    weight is `unit` times these integers.

    Attributes:
        unit: signed length of a step of the grid: the mean update is unit · Σ integers / Σ weights.
            With an adaptive bound S it is the length at S = 1, to be multiplied by the S of the
            round.
        bound: largest |integer| of one client in one coordinate, with its noise.
        shapes: shape of each trained tensor by name, in the order of the model.
        server_noise: whether the server adds the noise, one draw for the sum; else the clients do.
        count_unit: length of a step of the grid of `CLIP_COUNT`; None where no bound is learnt.
        divisor: a public number in place of the weights of those who came, where their number is
            secret; None elsewhere.
    """

    unit: float
    bound: int
    shapes: Mapping[str, tuple[int, ...]]
    server_noise: bool
    divisor: float | None = None
    count_unit: float | None = None


MIN_BOUND, MAX_BOUND = 1e-10, 1e10

LearntBound = float | tuple[float, ...]
"""The bound of the whole gradient or update, or C_m of each group of parameters."""


def whole_bound(bound: LearntBound) -> float:
    """Return the bound of the whole gradient, (Σ C_m²)^(1/2)."""
    return math.hypot(*bound) if isinstance(bound, tuple) else bound


@dataclass(frozen=True)
class BoundRule:
    """The next bound is C · exp(−η (b̄ − γ)) (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1).

    Attributes:
        quantile: γ, the target fraction of norms within the bound.
        learning_rate: η of the geometric update.

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
        """Return the bound after a release.

        Args:
            bound: C of the release.
            share: b̄, the released fraction of norms within it; noise may move it out of [0, 1].
        """
        exponent = -self.learning_rate * (share - self.quantile)
        # Noise may move b̄ far out of [0, 1]: no step changes the bound by more than a factor e.
        moved = bound * math.exp(min(max(exponent, -1.0), 1.0))
        return min(max(moved, MIN_BOUND), MAX_BOUND)


def check_bound(bound: LearntBound) -> float:
    """Return a bound that `BoundRule.next_bound` can have returned.

    Raises:
        ValueError: it never returns such a bound, or there are several.
    """
    if isinstance(bound, tuple):
        raise ValueError(f"there is one learnt bound, not one for each group, got {bound!r}")
    if not MIN_BOUND <= bound <= MAX_BOUND:
        raise ValueError(
            f"a learnt bound must be from {MIN_BOUND:g} to {MAX_BOUND:g}, got {bound!r}"
        )
    return bound

"""Clipping of per-example gradients: flat, automatic, in groups of parameters, and adaptive.

A clipping norm C bounds the L2 norm of a per-example gradient, or of its part in a group of
parameters. Adaptive clipping changes C after each batch, so that it follows a quantile of the
gradient norms, estimated with noise (Andrew et al. 2021). Automatic clipping normalises gradients;
it has a constant γ > 0 besides C.

Edge cases of the clip factor, by the L2 norm of a per-example gradient:

| norm                           | flat, per layer, adaptive | automatic              |
|--------------------------------|---------------------------|------------------------|
| 0                              | 1: the gradient stays 0   | C / γ: it stays 0      |
| at most C                      | 1, or 1 − 1e-6 close to C | C / (norm + γ)         |
| above C                        | C / norm                  | C / (norm + γ)         |
| NaN or infinite in any group   | 0 in all groups           | 0                      |
| finite, and C infinite         | 1: nothing is clipped     | refused: C must be finite |

Factors are reduced by the fraction 1e-6, so that rounding to float32 raises no clipped gradient
above C.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Self

import torch
from torch import Tensor

from fedsim.accountant.groups import (
    adaptive_clip_noise_multiplier,
    dimension_clip_norms,
    equal_clip_norms,
    explicit_clip_norms,
)
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, BoundRule, check_bound

# Rounding in float32 may raise a norm by a few units in the last place.
_ROUNDING_MARGIN = 1.0 - 1e-6

ClipRule = Literal["equal", "by_dimension"]


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of a model's parameters, with the clipping norm and the size of each group m.

    Attributes:
        members: indices of the parameter tensors in each group; together they are all parameters.
        bounds: clipping norm C_m of a per-example gradient in each group.
        dimensions: number d_m of scalar parameters in each group.

    Example:
        >>> from fedsim.clients.clipping.clipping import Groups
        >>> groups = Groups(members=((0,), (1,)), bounds=(3.0, 4.0), dimensions=(10, 2))
        >>> groups.sensitivity
        5.0
    """

    members: tuple[tuple[int, ...], ...]
    bounds: tuple[float, ...]
    dimensions: tuple[int, ...]

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum to adding, removing or zeroing one example."""
        return math.hypot(*self.bounds)


class Clipping(ABC):
    """Rule that clips per-example gradients, in one or several groups of parameters.

    Guarantee: in each group m, an example's contribution `factor * gradient` has an L2 norm of at
    most the clipping norm C_m. So adding or removing an example changes the sum of the group by at
    most C_m and the whole sum by at most `Groups.sensitivity`. An example whose gradient is not
    finite contributes exactly zero.
    """

    @abstractmethod
    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model's parameters, with their clipping norms."""

    def clip_factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """Return the factors min(1, clipping norm / norm) that clip each example in each group.

        The result is float64 (n, m). If the norm of an example is not finite in any group, all its
        factors are 0.

        Args:
            norms: L2 norms of n per-example gradients in m groups (n, m), float64.
            bounds: clipping norm of each group (m,), or one row for each example (n, m).
        """
        # A norm of 0 makes the quotient infinite, and the factor 1.
        factors = (bounds * _ROUNDING_MARGIN / norms).clamp_(max=1.0)
        return _zero_where_not_finite(factors, norms)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return (self,)

    @property
    def count_noises(self) -> tuple[float, ...]:
        """Standard deviations of the noise on adaptive clipping's counts of unclipped gradients.

        The tuple is empty if the clipping norms are fixed.
        """
        return ()

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return the gradients' noise multiplier, given the noise multiplier of the whole step.

        The noisy counts that adaptive clipping releases spend a part of the step's privacy.

        Raises:
            ValueError: the released counts alone spend more privacy than the step may.
        """
        return noise_multiplier

    def adapt(self, *shares: float) -> "Clipping":
        """Return the clipping rule for the next batch, with its clipping norm adapted.

        Args:
            shares: the noisy share of unclipped gradients in each group of the current batch.
        """
        return self

    @property
    def adapted_clip_norm(self) -> AdaptiveClipNorm | None:
        """Current clipping norm of adaptive clipping, or None if the clipping norm is fixed."""
        return None

    def resume(self, clip_norm: AdaptiveClipNorm) -> "Clipping":
        """Return the clipping rule that continues from the given adaptive clipping norm.

        Raises:
            ValueError: the rule has a fixed clipping norm, or `adapt` never returns the given norm.
        """
        raise ValueError(
            f"clipping with a fixed clip norm cannot resume from an adapted one, got {clip_norm}"
        )


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clipping that scales each per-example gradient down to L2 norm at most `max_grad_norm`."""

    max_grad_norm: float

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return (type(self),)

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return one group that holds all parameters."""
        members = (tuple(range(len(parameters.tensors))),)
        return Groups(members, (self.max_grad_norm,), (parameters.size,))


@dataclass(frozen=True)
class AutomaticClipping(FlatClipping):
    """Clipping that scales a per-example gradient to L2 norm C · norm / (norm + γ).

    C is `max_grad_norm` and γ is `gamma` (AUTO-S, Bu et al. 2023). Gradients are normalised rather
    than clipped. C has the same effect as the learning rate, so there is no clipping norm to tune.
    γ keeps small gradients small.

    Guarantee: the norm of a scaled gradient is below C.

    Raises:
        ValueError: C or γ is not positive and finite.
    """

    gamma: float = 0.01

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return (AutomaticClipping, self.gamma)

    def __post_init__(self) -> None:
        for name, value in (("max_grad_norm", self.max_grad_norm), ("gamma", self.gamma)):
            if not 0.0 < value < math.inf:
                raise ValueError(
                    f"{name} of automatic clipping must be > 0 and finite, got {value}"
                )

    def clip_factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """Return the factors C / (norm + γ), (n, 1), and 0 where the norm is not finite."""
        return _zero_where_not_finite(bounds * _ROUNDING_MARGIN / (norms + self.gamma), norms)


@dataclass(frozen=True)
class GroupClipping(Clipping):
    """Clipping of groups of parameters, each to its own clipping norm C_m, with Σ C_m² ≤ C².

    Attributes:
        max_grad_norm: C, bound on the L2 norm of the whole clipped gradient.
        patterns: patterns of parameter names (`fnmatch`: `encoder.*`, `*.bias`), one for each
            group; a parameter belongs to the first pattern that fits. With None, each layer is a
            group, which has both weight and bias.
        bounds: the clipping norms C_m: "equal" (C_m = C / √M for M groups), "by_dimension" (C_m = C
            √(d_m / d), where the model has d trained values and group m has d_m of them), or a
            tuple of all C_m.
    """

    max_grad_norm: float
    patterns: tuple[str, ...] | None = None
    bounds: ClipRule | tuple[float, ...] = "equal"

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return (GroupClipping, self.patterns)

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model's parameters, in the order of the patterns or of its layers.

        Raises:
            ValueError: a parameter fits no pattern, a pattern fits no parameter, or explicit
                bounds are not one for each group or together exceed C.
        """
        members = (
            _by_layer(parameters.names)
            if self.patterns is None
            else _by_pattern(parameters.names, self.patterns)
        )
        sizes = [sum(parameters.sizes[i] for i in group) for group in members]
        return Groups(members, self._bounds(sizes), tuple(sizes))

    def _bounds(self, sizes: list[int]) -> tuple[float, ...]:
        if isinstance(self.bounds, tuple) and len(self.bounds) != len(sizes):
            raise ValueError(
                f"bounds must be one for each of the {len(sizes)} groups, got {len(self.bounds)}"
            )
        if math.isinf(self.max_grad_norm):  # C = ∞ cannot be divided, nor exceeded
            return self.bounds if isinstance(self.bounds, tuple) else (math.inf,) * len(sizes)
        match self.bounds:
            case "equal":
                bounds = equal_clip_norms(self.max_grad_norm, len(sizes))
            case "by_dimension":
                bounds = dimension_clip_norms(self.max_grad_norm, sizes)
            case given:
                bounds = explicit_clip_norms(self.max_grad_norm, given)
        return tuple(bounds.tolist())


def _zero_where_not_finite(factors: Tensor, norms: Tensor) -> Tensor:
    """Set all factors of an example to 0 where one of its norms is not finite."""
    # C / ∞ is 0 already; a factor is NaN where the norm is, or for 0 / 0.
    factors.nan_to_num_(nan=0.0)
    if norms.shape[1] == 1:
        return factors
    return factors.masked_fill_(~torch.isfinite(norms).all(1, keepdim=True), 0.0)


def _by_layer(names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name.rpartition(".")[0], []).append(index)
    return tuple(tuple(group) for group in groups.values())


def _by_pattern(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = [[] for _ in patterns]
    for index, name in enumerate(names):
        fitting = [group for group, p in zip(groups, patterns, strict=True) if fnmatchcase(name, p)]
        if not fitting:
            raise ValueError(f"no pattern fits parameter {name!r}; add '*' as the last pattern")
        fitting[0].append(index)
    for pattern, group in zip(patterns, groups, strict=True):
        if not group:
            raise ValueError(
                f"pattern {pattern!r} has no parameter left to fit; parameters: {', '.join(names)}"
            )
    return tuple(tuple(group) for group in groups)


# Andrew et al. 2021, section 3.1: σ_b = (expected batch) / 20 hardly costs anything.
BATCH_OVER_COUNT_NOISE = 20.0


@dataclass(frozen=True)
class AdaptiveClipping(FlatClipping):
    """Clipping to a norm that follows a quantile of the gradient norms.

    With each batch, a count of unclipped gradients, Σ_i (b_i − ½), is released with Gaussian noise
    of standard deviation σ_b. Here b_i is 1 if gradient i has norm at most the clipping norm C,
    else 0. The noisy share b̄ is the noisy count divided by the public expected batch size, plus ½.
    The next clipping norm is C · exp(−η (b̄ − γ)), with learning rate η and target share γ (Andrew
    et al. 2021, arXiv:1905.03871, Algorithm 1).

    Guarantee: an example changes the count by at most ½. So gradients with noise multiplier z_Δ and
    the count together are one Gaussian release with z = (z_Δ⁻² + (2 σ_b)⁻²)^(−1/2), whatever the
    batch. C changes between batches only, and is a function of the releases.

    Attributes:
        max_grad_norm: C, clipping norm of the next batch, and the only value that changes.
        count_noise: σ_b, standard deviation of the noise on the count.
        quantile: γ, target share of unclipped gradients.
        learning_rate: η of the geometric update.

    Raises:
        ValueError: an attribute is outside its range.
    """

    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        for name in ("max_grad_norm", "count_noise"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value!r}")
        self._rule()

    @classmethod
    def for_batch(
        cls,
        expected_batch: float,
        *,
        max_grad_norm: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
    ) -> Self:
        """Return adaptive clipping that adds noise of deviation `expected_batch` / 20 to its count.

        Args:
            expected_batch: public expected batch size.
            max_grad_norm: clipping norm of the first batch.
            quantile: target share of unclipped gradients, in [0, 1].
            learning_rate: learning rate > 0 of the geometric update of the clipping norm.
        """
        return cls(max_grad_norm, expected_batch / BATCH_OVER_COUNT_NOISE, quantile, learning_rate)

    @property
    def adapted_clip_norm(self) -> float:
        """Clipping norm of the next batch."""
        return self.max_grad_norm

    def resume(self, clip_norm: AdaptiveClipNorm) -> Self:
        """Return the clipping rule that continues from the given adaptive clipping norm.

        Guarantee: a batch costs the same under every clipping norm C: gradients are clipped to C,
        their noise is proportional to C, and an example changes the count by at most ½.

        Raises:
            ValueError: `adapt` never returns such a clipping norm.
        """
        return replace(self, max_grad_norm=check_bound(clip_norm))

    @property
    def count_noises(self) -> tuple[float, ...]:
        """Standard deviation of the noise on the count of unclipped gradients, as a 1-tuple."""
        return (self.count_noise,)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return the gradients' noise multiplier, given the noise multiplier of the whole step.

        Args:
            noise_multiplier: noise multiplier of gradients and count together.

        Raises:
            ValueError: the count alone would spend the whole budget.
        """
        if noise_multiplier == 0.0:
            return 0.0
        if self.count_noise <= 0.5 * noise_multiplier:
            raise ValueError(
                f"adaptive clipping needs count noise > noise_multiplier / 2 = "
                f"{0.5 * noise_multiplier:.6g}, got {self.count_noise:.6g}: the count of clipped "
                "examples alone would spend the whole budget; use larger batches (the default "
                "count noise is expected batch size / 20), more count noise, or flat clipping"
            )
        return adaptive_clip_noise_multiplier(noise_multiplier, self.count_noise)

    def adapt(self, *shares: float) -> Self:
        """Return the clipping rule for the next batch.

        Args:
            shares: the noisy share of unclipped gradients in the current batch, a single number.
        """
        (share,) = shares
        bound = self._rule().next_bound(self.max_grad_norm, share)
        return replace(self, max_grad_norm=bound)

    def _rule(self) -> BoundRule:
        return BoundRule(self.quantile, self.learning_rate)

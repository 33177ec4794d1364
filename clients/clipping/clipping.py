"""Clipping of per-example gradients, flat, automatic or in groups, and the noise of each group.

A clipping norm C bounds the L2 norm of a per-example gradient, or of its part in a group of
parameters. Automatic clipping normalises gradients; it has a constant γ > 0 besides C.
`clipping.adaptive` has clipping norms that change after each batch.

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
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from fedsim.accountant.groups import (
    dimension_clip_norms,
    equal_clip_norms,
    explicit_clip_norms,
    group_noise_multiplier,
    least_energy_noise,
)
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.protocol.noisy_sums import AdaptiveClipNorm

# Rounding in float32 may raise a norm by a few units in the last place.
_ROUNDING_MARGIN = 1.0 - 1e-6

ClipRule = Literal["equal", "by_dimension"]
ALL_OTHERS = "*"


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

        The result is float64 (n, m). If an example has a NaN or infinite norm in one group or
        more, all factors of this example are 0.

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

    def whole_noise(self, gradient_noise: float) -> float:
        """Return the whole step's noise multiplier from that of the gradients.

        This is the inverse function of `gradient_noise`.
        """
        return gradient_noise

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
            ValueError: the rule has a fixed clipping norm, or the given norm is not valid.
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
    Because of γ, small gradients stay small.

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
class LayerClipping(Clipping):
    """Clipping of each layer to a separate clipping norm C_m, with Σ C_m² ≤ C².

    A layer is a module that directly holds trained parameters, such as a weight and a bias.

    Attributes:
        max_grad_norm: C, bound on the L2 norm of the whole clipped gradient.
        bounds: the clipping norms C_m: "equal" (C_m = C / √M for M layers), "by_dimension" (C_m = C
            √(d_m / d), where the model has d trained values and layer m has d_m of them), or a
            tuple of all C_m.
    """

    max_grad_norm: float
    bounds: ClipRule | tuple[float, ...] = "equal"

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return (LayerClipping,)

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the layers of a model's parameters, in the order of the model.

        Raises:
            ValueError: `bounds` is a tuple that does not have one norm for each layer, or whose
                norms have Σ C_m² > C².
        """
        layers: dict[str, list[int]] = {}
        for index, name in enumerate(parameters.names):
            layers.setdefault(name.rpartition(".")[0], []).append(index)
        members = tuple(map(tuple, layers.values()))
        sizes = _sizes(parameters, members)
        return Groups(members, self._bounds(sizes), sizes)

    def _bounds(self, sizes: Sequence[int]) -> tuple[float, ...]:
        if isinstance(self.bounds, tuple) and len(self.bounds) != len(sizes):
            raise ValueError(
                f"bounds must be one for each of the {len(sizes)} layers, got {len(self.bounds)}"
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


@dataclass(frozen=True)
class PatternClipping(Clipping):
    """Clipping of parameter groups, chosen by name patterns, each to a separate clipping norm.

    Each parameter belongs to the group whose pattern (`fnmatch`: `conv.*`, `*.bias`) fits its name.
    The pattern `*` fits only parameters that no other pattern fits.

    Attributes:
        patterns: name pattern of each group.
        bounds: clipping norm of each group.

    Raises:
        ValueError: an attribute is outside its range.
    """

    patterns: tuple[str, ...]
    bounds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.patterns or len(self.patterns) != len(self.bounds):
            raise ValueError(
                f"groups need one bound for each of {self.patterns}, got {self.bounds}"
            )
        if not all(bound > 0.0 for bound in self.bounds):
            raise ValueError(f"bounds of groups must be > 0, got {self.bounds}")

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return type(self), self.patterns

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model's parameters, in the order of the patterns.

        Raises:
            ValueError: a parameter is in no group or in several, or a group has no parameter; the
                message names it.
        """
        members = exclusive_groups(parameters.names, self.patterns)
        return Groups(members, self.bounds, _sizes(parameters, members))


def _zero_where_not_finite(factors: Tensor, norms: Tensor) -> Tensor:
    """Set all factors of an example to 0 where one of its norms is not finite."""
    # C / ∞ is 0 already; a factor is NaN where the norm is, or for 0 / 0.
    factors.nan_to_num_(nan=0.0)
    if norms.shape[1] == 1:
        return factors
    return factors.masked_fill_(~torch.isfinite(norms).all(1, keepdim=True), 0.0)


def _sizes(parameters: FlatParameters, members: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the number of trained values in each group."""
    return tuple(sum(parameters.sizes[i] for i in group) for group in members)


def exclusive_groups(names: Sequence[str], patterns: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Divide parameter names into groups by patterns, so that each name is in exactly one group.

    Args:
        names: names of the trained parameters.
        patterns: pattern of each group; `*` takes the names that no other pattern fits.

    Returns:
        For each pattern, the indices of its names.

    Raises:
        ValueError: a name is in no group or in several, or a group is empty; the message names it.
    """
    groups: dict[str, list[int]] = {pattern: [] for pattern in patterns}
    for index, name in enumerate(names):
        fitting = [
            pattern for pattern in patterns if pattern != ALL_OTHERS and fnmatchcase(name, pattern)
        ]
        if not fitting and ALL_OTHERS in groups:
            fitting = [ALL_OTHERS]
        if not fitting:
            raise ValueError(
                f"parameter {name!r} is in no group; add a pattern that fits it, or {ALL_OTHERS!r} "
                "for all others"
            )
        if len(fitting) > 1:
            raise ValueError(
                f"parameter {name!r} is in the groups {fitting[0]!r} and {fitting[1]!r}; write "
                "patterns of which exactly one fits"
            )
        groups[fitting[0]].append(index)
    for pattern, members in groups.items():
        if not members:
            raise ValueError(
                f"group {pattern!r} has no parameter; trained parameters: {', '.join(names)}"
            )
    return tuple(tuple(members) for members in groups.values())


@dataclass(frozen=True)
class ChosenNoise:
    """Noise multipliers given for some groups of parameters; those of other groups are computed.

    Attributes:
        given: noise multiplier of each group; None for a group whose noise multiplier is computed.
        relative: weight of each group; computed noise multipliers are proportional to the weights.
    """

    given: tuple[float | None, ...]
    relative: tuple[float, ...]

    @property
    def together(self) -> float | None:
        """Noise multiplier of all groups together; None unless it is given for each group."""
        known = [z_m for z_m in self.given if z_m is not None]
        return group_noise_multiplier(known) if len(known) == len(self.given) else None

    def multipliers(self, noise_multiplier: float) -> tuple[float, ...]:
        """Return the noise multiplier of each group.

        Guarantee: the noise multipliers z_m of the groups satisfy (Σ z_m⁻²)^(−1/2) = z, where z is
        `noise_multiplier`.

        Args:
            noise_multiplier: noise multiplier z > 0 of all groups together.

        Raises:
            ValueError: the given z_m leave no privacy for the other groups, or all z_m are given
                and do not satisfy this equation.
        """
        known = [z_m for z_m in self.given if z_m is not None]
        if len(known) == len(self.given):
            check_allocation(tuple(known), noise_multiplier)
            return tuple(known)
        spent = math.fsum((noise_multiplier / z_m) ** 2 for z_m in known)  # share of z⁻²
        if spent >= 1.0:
            raise ValueError(
                f"groups with noise multipliers {known} have {group_noise_multiplier(known):.4g} "
                f"together, and the whole step needs more than {noise_multiplier:.4g}: nothing is "
                "left for the other groups; give these groups more noise, or allow a larger ε"
            )
        free = [r for r, z_m in zip(self.relative, self.given, strict=True) if z_m is None]
        scale = noise_multiplier / (group_noise_multiplier(free) * math.sqrt(1.0 - spent))
        return tuple(
            scale * r if z_m is None else z_m
            for r, z_m in zip(self.relative, self.given, strict=True)
        )


NoiseAllocation = Literal["uniform", "proportional", "optimal"] | tuple[float, ...] | ChosenNoise

_ROUNDING_TOLERANCE = 1e-9  # relative


def check_allocation(allocation: NoiseAllocation, noise_multiplier: float) -> None:
    """Check that the explicit noise multipliers of groups fit the noise of the whole step.

    Args:
        allocation: noise multiplier z_m of all or some groups, or the name of a rule, which passes
            the check.
        noise_multiplier: noise multiplier z of the whole step.

    Raises:
        ValueError: (Σ z_m⁻²)^(−1/2) is not z; the message names it.
    """
    if isinstance(allocation, str):
        return
    if isinstance(allocation, ChosenNoise):
        if noise_multiplier:
            allocation.multipliers(noise_multiplier)
        return
    together = group_noise_multiplier(allocation)
    if not math.isclose(together, noise_multiplier, rel_tol=_ROUNDING_TOLERANCE):
        raise ValueError(
            f"groups with noise multipliers {list(allocation)} have {together:.12g} together, "
            f"(sum of z_m^-2)^(-1/2); noise_multiplier must be that, got {noise_multiplier!r}"
        )


def group_noise(
    allocation: NoiseAllocation, noise_multiplier: float, groups: Groups
) -> tuple[float, ...]:
    """Return the standard deviation of the noise on the clipped sum, for each group.

    Group m has clipping norm C_m, d_m values and noise multiplier z_m; its noise has the deviation
    σ_m = z_m C_m. The whole step has noise multiplier z. The rules for M groups are:

    - "uniform": σ_m = z · (Σ C_m²)^(1/2), the same for each group;
    - "proportional": the same z_m = z √M for each group, σ_m = z_m C_m;
    - "optimal": σ_m with the least total noise Σ d_m σ_m²; equal to "uniform" if C_m ∝ √d_m;
    - explicit z_m: σ_m = z_m C_m.

    | edge case            | result                                         |
    |----------------------|------------------------------------------------|
    | z = 0                | σ_m = 0 in all groups, also for infinite C_m   |
    | z > 0, C_m infinite  | refused                                        |
    | one group            | σ = z C under every rule                       |

    Args:
        allocation: name of the rule, or one z_m for each group.
        noise_multiplier: noise multiplier z of the whole step.
        groups: clipping norms C_m and dimensions d_m of the M groups.

    Guarantee: (Σ C_m² / σ_m²)^(−1/2) = z, so all groups together are one Gaussian release with z.

    Raises:
        ValueError: the number of explicit z_m is not M, or a C_m is infinite though z > 0.
    """
    z, bounds = noise_multiplier, groups.bounds
    if isinstance(allocation, ChosenNoise):
        allocation = allocation.multipliers(z) if z else tuple(1.0 for _ in allocation.given)
    if not isinstance(allocation, str) and len(allocation) != len(bounds):
        raise ValueError(
            f"there must be one noise multiplier for each of the {len(bounds)} groups, "
            f"got {len(allocation)}"
        )
    if z == 0.0:  # no privacy, for comparison; 0 · ∞ would be NaN
        return (0.0,) * len(bounds)
    if not math.isfinite(groups.sensitivity):
        raise ValueError("noise needs a finite max_grad_norm; set one, or noise_multiplier to 0")
    if allocation == "uniform" or len(bounds) == 1:
        return (z * groups.sensitivity,) * len(bounds)
    if allocation == "proportional":
        return tuple(z * math.sqrt(len(bounds)) * bound for bound in bounds)
    if allocation == "optimal":
        return tuple(least_energy_noise(z, bounds, groups.dimensions).tolist())
    # z is raised where a count is released as well; all groups are raised by the same factor.
    factor = z / group_noise_multiplier(allocation)
    return tuple(factor * z_m * bound for z_m, bound in zip(allocation, bounds, strict=True))

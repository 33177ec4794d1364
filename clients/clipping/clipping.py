"""Clipping of per-example gradients: flat, automatic, by layer, and in groups of parameters.

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

from fedsim.accountant.groups import dimension_clip_norms, equal_clip_norms, explicit_clip_norms
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

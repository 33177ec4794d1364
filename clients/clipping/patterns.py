"""Clipping of groups that are named by patterns, each to a fixed bound or a private quantile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Self

from fedsim.accountant.groups import (
    adaptive_clip_noise_multiplier,
    adaptive_clip_total_noise_multiplier,
)
from fedsim.clients.clipping.clipping import Clipping, Groups
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.protocol.noisy_sums import BoundRule, LearntBound, check_bound

ALL_OTHERS = "*"


@dataclass(frozen=True)
class PatternClipping(Clipping):
    """Clip each group of parameters to a bound of its own.

    A parameter is in the one group whose pattern (`fnmatch`: `conv.*`, `*.bias`) fits its name; the
    pattern `*` takes all that no other one fits.

    With `count_noise`, each bound follows a quantile of its group's norms as in `AdaptiveClipping`,
    by one count for each group that is released with the lot.

    Guarantee: an example moves each count by at most ½, so gradients at z_Δ and all M counts are
    one Gaussian release with z = (z_Δ⁻² + M (2 σ_b)⁻²)^(−1/2) (Andrew et al. 2021, Theorem 1, for
    each group; McMahan et al. 2018, section 3). Bounds change between lots only, and are a function
    of the releases.

    Attributes:
        patterns: the pattern of each group.
        bounds: C_m of each group; with `count_noise`, of the next lot.
        count_noise: σ_b on the count of each group; None: the bounds are fixed.
        quantile: γ, the target fraction of examples within a bound.
        learning_rate: η of the geometric update.

    Raises:
        ValueError: an attribute is outside its range.
    """

    patterns: tuple[str, ...]
    bounds: tuple[float, ...]
    count_noise: float | None = None
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        if not self.patterns or len(self.patterns) != len(self.bounds):
            raise ValueError(
                f"groups need one bound for each of {self.patterns}, got {self.bounds}"
            )
        if not min(self.bounds) > 0.0:
            raise ValueError(f"bounds of groups must be > 0, got {self.bounds}")
        if self.count_noise is not None and not self.count_noise > 0.0:
            raise ValueError(f"count_noise must be > 0, got {self.count_noise!r}")
        self._rule()

    @property
    def kind(self) -> tuple[object, ...]:
        """The rule without its bounds: the grouping of parameters."""
        return PatternClipping, self.patterns, self.count_noise is None

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model in the order of the patterns.

        Raises:
            ValueError: a parameter is in no group or in several, or a group has no parameter; the
                message names it.
        """
        members = exclusive_groups(parameters.names, self.patterns)
        sizes = tuple(sum(parameters.sizes[i] for i in group) for group in members)
        return Groups(members, self.bounds, sizes)

    @property
    def count_noises(self) -> tuple[float, ...]:
        """σ_b of the count of each group; nothing where the bounds are fixed."""
        return () if self.count_noise is None else (self.count_noise,) * len(self.patterns)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return z_Δ, the noise multiplier of the gradients with which the whole step has z.

        Raises:
            ValueError: the counts alone would spend the whole budget.
        """
        if noise_multiplier == 0.0 or self.count_noise is None:
            return noise_multiplier
        try:
            return adaptive_clip_noise_multiplier(
                noise_multiplier, self.count_noise, len(self.patterns)
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; use larger lots (the default count noise is expected lot / 20), more "
                "clipping.count_noise, fewer groups, or clipping: flat"
            ) from error

    def whole_noise(self, gradient_noise: float) -> float:
        """Return z of the gradients at z_Δ and the counts together, the inverse of the above."""
        if self.count_noise is None:
            return gradient_noise
        return adaptive_clip_total_noise_multiplier(
            gradient_noise, self.count_noise, len(self.patterns)
        )

    @property
    def adapted_clip_norm(self) -> tuple[float, ...] | None:
        """C_m of the next lot; None where the bounds are fixed."""
        return None if self.count_noise is None else self.bounds

    def resume(self, clip_norm: LearntBound) -> Self:
        """Return the clipping that continues from adapted bounds, one for each group.

        Raises:
            ValueError: the bounds are fixed, or are not such bounds.
        """
        if self.count_noise is None:
            raise ValueError(f"groups with fixed bounds cannot go on from learnt ones: {clip_norm}")
        if not isinstance(clip_norm, tuple) or len(clip_norm) != len(self.patterns):
            raise ValueError(
                f"there must be one learnt bound for each of {len(self.patterns)} groups, got "
                f"{clip_norm}"
            )
        return replace(self, bounds=tuple(check_bound(one) for one in clip_norm))

    def adapt(self, *shares: float) -> Self:
        """Return the clipping of the next lot, given b̄ of each group."""
        rule = self._rule()
        moved = (rule.next_bound(*pair) for pair in zip(self.bounds, shares, strict=True))
        return replace(self, bounds=tuple(moved))

    def _rule(self) -> BoundRule:
        return BoundRule(self.quantile, self.learning_rate)


def exclusive_groups(names: Sequence[str], patterns: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the names in each group, where every name is in exactly one.

    Args:
        names: of the trained parameters.
        patterns: of the groups; `*` takes what no other one fits.

    Raises:
        ValueError: a name is in no group or in several, or a group is empty; the message names it.
    """
    groups: dict[str, list[int]] = {pattern: [] for pattern in patterns}
    for index, name in enumerate(names):
        fitting = [one for one in patterns if one != ALL_OTHERS and fnmatchcase(name, one)]
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

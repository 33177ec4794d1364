"""Clipping of groups of parameters, which are chosen by patterns of parameter names."""

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
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, BoundRule, check_bound

ALL_OTHERS = "*"


@dataclass(frozen=True)
class PatternClipping(Clipping):
    """Clipping of parameter groups, chosen by name patterns, each to a separate clipping norm.

    Each parameter belongs to the group whose pattern (`fnmatch`: `conv.*`, `*.bias`) fits its name.
    The pattern `*` fits only parameters that no other pattern fits.

    With `count_noise`, each clipping norm follows a quantile of the group's gradient norms, as in
    `AdaptiveClipping`. One noisy count for each group is then released with the batch.

    Guarantee: an example changes each count by at most ½. So gradients with noise multiplier z_Δ
    and all M counts with noise σ_b are one Gaussian release with z = (z_Δ⁻² + M (2 σ_b)⁻²)^(−1/2)
    (Andrew et al. 2021, Theorem 1, for each group; McMahan et al. 2018, section 3). Clipping norms
    change between batches only, and are a function of the releases.

    Attributes:
        patterns: name pattern of each group.
        bounds: clipping norm of each group; under adaptive clipping, the norm for the next batch.
        count_noise: σ_b, standard deviation of the noise on the count of each group, or None if the
            clipping norms are fixed.
        quantile: target share of unclipped gradients in each group.
        learning_rate: learning rate of the geometric update of the clipping norms.

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
        """Key that two clipping rules share if they differ in nothing but their clipping norms."""
        return PatternClipping, self.patterns, self.count_noise is None

    def groups(self, parameters: FlatParameters) -> Groups:
        """Return the groups of a model's parameters, in the order of the patterns.

        Raises:
            ValueError: a parameter is in no group or in several, or a group has no parameter; the
                message names it.
        """
        members = exclusive_groups(parameters.names, self.patterns)
        sizes = tuple(sum(parameters.sizes[i] for i in group) for group in members)
        return Groups(members, self.bounds, sizes)

    @property
    def count_noises(self) -> tuple[float, ...]:
        """Standard deviation of the noise on each group's count; empty for fixed clipping norms."""
        return () if self.count_noise is None else (self.count_noise,) * len(self.patterns)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """Return the gradients' noise multiplier, given the noise multiplier of the whole step.

        Args:
            noise_multiplier: noise multiplier of gradients and counts together.

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
                f"{error}; use larger batches (the default count noise is expected batch size / "
                "20), more clipping.count_noise, fewer groups, or clipping: flat"
            ) from error

    def whole_noise(self, gradient_noise: float) -> float:
        """Return the noise multiplier of the whole step, given the gradients' noise multiplier.

        Args:
            gradient_noise: noise multiplier of the gradients, as `gradient_noise` returns it.
        """
        if self.count_noise is None:
            return gradient_noise
        return adaptive_clip_total_noise_multiplier(
            gradient_noise, self.count_noise, len(self.patterns)
        )

    @property
    def adapted_clip_norm(self) -> tuple[float, ...] | None:
        """Clipping norms of the next batch under adaptive clipping, or None if they are fixed."""
        return None if self.count_noise is None else self.bounds

    def resume(self, clip_norm: AdaptiveClipNorm) -> Self:
        """Return the clipping rule that continues from the given adaptive clipping norms.

        Args:
            clip_norm: a tuple with the clipping norm of each group.

        Raises:
            ValueError: the clipping norms are fixed, or `clip_norm` has not one valid value for
                each group.
        """
        if self.count_noise is None:
            raise ValueError(
                f"groups with fixed clip norms cannot resume from adapted ones, got {clip_norm}"
            )
        if not isinstance(clip_norm, tuple) or len(clip_norm) != len(self.patterns):
            raise ValueError(
                f"there must be one adapted clip norm for each of {len(self.patterns)} groups, got "
                f"{clip_norm}"
            )
        return replace(self, bounds=tuple(check_bound(bound) for bound in clip_norm))

    def adapt(self, *shares: float) -> Self:
        """Return the clipping rule for the next batch.

        Args:
            shares: the noisy share of unclipped gradients of each group in the current batch.
        """
        rule = self._rule()
        moved = (rule.next_bound(*pair) for pair in zip(self.bounds, shares, strict=True))
        return replace(self, bounds=tuple(moved))

    def _rule(self) -> BoundRule:
        return BoundRule(self.quantile, self.learning_rate)


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

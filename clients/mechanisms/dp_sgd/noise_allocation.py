"""Allocation of the noise of a step to groups of parameters."""

import math
from dataclasses import dataclass
from typing import Literal

from fedsim.accountant.groups import group_noise_multiplier, least_energy_noise
from fedsim.clients.clipping.clipping import Groups


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

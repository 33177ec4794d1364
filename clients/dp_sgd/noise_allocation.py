"""Allocation of one step's noise to groups of parameters."""

import math
from typing import Literal

from fedsim.accountant.groups import group_noise_multiplier, least_energy_noise
from fedsim.clients.dp_sgd.clipping import Groups

NoiseAllocation = Literal["uniform", "proportional", "optimal"] | tuple[float, ...]

_ROUNDING_TOLERANCE = 1e-9  # relative


def check_allocation(allocation: NoiseAllocation, noise_multiplier: float) -> None:
    """Check that explicit noise multipliers z_m together are `noise_multiplier`.

    Args:
        allocation: a rule, which always fits, or one z_m for each group.
        noise_multiplier: z of the whole step.

    Raises:
        ValueError: (Σ z_m⁻²)^(−1/2) is another number; it is named.
    """
    if isinstance(allocation, str):
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
    """Return σ_m, the standard deviation of the noise on the clipped sum, for each group.

    - "uniform": the same σ everywhere, z · (Σ C_m²)^(1/2);
    - "proportional": the same z_m = z √M for each group, σ_m = z_m C_m;
    - "optimal": least total noise Σ d_m σ_m²; the same as "uniform" where C_m ∝ √d_m;
    - explicit z_m: σ_m = z_m C_m.

    | edge case            | result                                         |
    |----------------------|------------------------------------------------|
    | z = 0                | σ_m = 0 in all groups, also for infinite C_m   |
    | z > 0, C_m infinite  | refused                                        |
    | one group            | σ = z C under every rule                       |

    Args:
        allocation: the rule, or one z_m for each group.
        noise_multiplier: z of the whole step.
        groups: bounds C_m and dimensions d_m.

    Guarantee: (Σ C_m² / σ_m²)^(−1/2) = z, so all groups together are one Gaussian release with z.

    Raises:
        ValueError: explicit z_m are not one for each group, or a bound is infinite though z > 0.
    """
    z, bounds = noise_multiplier, groups.bounds
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
    return tuple(factor * own * bound for own, bound in zip(allocation, bounds, strict=True))

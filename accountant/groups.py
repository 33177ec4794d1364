"""Clip norms and noise of separately clipped groups of parameters, and of adaptive clipping.

For each example, the gradient of group m is clipped to norm C_m. The sum over the batch gets noise
of standard deviation sigma_m = z_m C_m in this group. Divide each group by its sigma_m. Then one
example moves the vector of all groups by at most (sum of z_m^-2)^(1/2) in L2 norm. So all groups
together are ONE Gaussian release with z* = (sum of z_m^-2)^(-1/2) (McMahan et al. 2018,
arXiv:1812.06210, section 3). z* depends neither on the C_m nor on the batch size.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.events import JointGaussian

_ROUNDING = 1e-12  # relative excess of sum C_m^2 over C^2 that rounding alone explains


def equal_clip_norms(clip_norm: float, num_groups: int) -> Floats:
    """Return equal clip norms C_m = C / sqrt(M) for M groups of parameters, shape (M,).

    Args:
        clip_norm: C > 0, the clip norm of the whole gradient.
        num_groups: M >= 1.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.groups import equal_clip_norms
        >>> equal_clip_norms(1.0, 4).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    groups = checks.whole_number("num_groups", num_groups)
    if groups < 1:
        raise ValueError(f"num_groups must be >= 1, got {groups!r}")
    return explicit_clip_norms(clip_norm, np.full(groups, clip_norm / math.sqrt(groups)).tolist())


def dimension_clip_norms(clip_norm: float, dimensions: Sequence[int]) -> Floats:
    """Return clip norms C_m = C sqrt(d_m / sum of d), larger for groups with more coordinates.

    Each coordinate gets the same share of C^2. The result has shape (M,) for M groups.

    Args:
        clip_norm: C > 0, the clip norm of the whole gradient.
        dimensions: d_m >= 1, the number of coordinates of each group.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.groups import dimension_clip_norms
        >>> dimension_clip_norms(1.0, [90, 10]).round(3).tolist()
        [0.949, 0.316]
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    sizes = _dimensions(dimensions)
    return explicit_clip_norms(clip_norm, (clip_norm * np.sqrt(sizes / sizes.sum())).tolist())


def explicit_clip_norms(clip_norm: float, clip_norms: Sequence[float]) -> Floats:
    """Check the given clip norms C_m of M groups and return them, shape (M,).

    Guarantee: sum of C_m^2 <= C^2 (up to rounding), so clipping each group to C_m clips the whole
    gradient to C.

    Args:
        clip_norm: C > 0, the clip norm of the whole gradient.
        clip_norms: C_m > 0 of each group; at least one group.

    Raises:
        ValueError: a value is outside its range, or the sum of squares exceeds C^2.
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    values = _positive_values("clip_norms", clip_norms)
    total = float(np.linalg.norm(values / clip_norm))
    if total > 1.0 + _ROUNDING:
        raise ValueError(
            f"clip_norms must satisfy sum of squares <= clip_norm^2 = {clip_norm**2:.6g}, "
            f"got {float(np.sum(values**2)):.6g}; divide them by {total:.6g}"
        )
    return values


def group_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Return z* = (sum of z_m^-2)^(-1/2), the noise multiplier of M groups of parameters together.

    Group m is clipped and gets noise separately, with noise multiplier z_m. All groups together are
    one Gaussian release with noise multiplier z*. If all z_m are equal, z* = z_m / sqrt(M); in
    general z* is sqrt(M) times smaller than the power mean of order -2 ("quadratic harmonic mean")
    of the z_m. For sampled steps, account for one sampled release with z*: separately sampled
    releases of the groups would under-report epsilon.

    Args:
        noise_multipliers: z_m >= 0 of each group, at least one group. If one of them is 0, z* is 0.

    Raises:
        ValueError: `noise_multipliers` is empty, or a value is negative or not finite.

    Example:
        >>> from fedsim.accountant.groups import group_noise_multiplier
        >>> round(group_noise_multiplier([3.0, 4.0]), 3)
        2.4
    """
    return JointGaussian(tuple(noise_multipliers)).noise_multiplier


def least_energy_noise(
    noise_multiplier: float, clip_norms: Sequence[float], dimensions: Sequence[int]
) -> Floats:
    """Return the noise sigma_m of each of M groups, (M,), that minimises the sum of d_m sigma_m^2.

    sigma_m is a standard deviation, and all groups together keep the given noise multiplier z. By
    Lagrange's condition d_m sigma_m^4 is proportional to C_m^2, so sigma_m^2 = z^2 (sum over k of
    C_k sqrt(d_k)) C_m / sqrt(d_m). The minimum is z^2 (sum of C_k sqrt(d_k))^2.

    Guarantee: group_noise_multiplier(sigma_m / C_m) = z.

    Args:
        noise_multiplier: z > 0, of all groups together.
        clip_norms: C_m > 0 of each group.
        dimensions: d_m >= 1, the number of coordinates of each group.

    Raises:
        ValueError: a value is outside its range, or the lengths differ.
    """
    z = checks.positive("noise_multiplier", noise_multiplier)
    clips, sizes = _positive_values("clip_norms", clip_norms), _dimensions(dimensions)
    if clips.shape != sizes.shape:
        raise ValueError(
            f"dimensions must have one value for each of the {clips.size} clip_norms, "
            f"got {sizes.size}"
        )
    roots = np.sqrt(sizes)
    return z * np.sqrt(float(clips @ roots) * clips / roots)


def adaptive_clip_noise_multiplier(
    noise_multiplier: float, count_noise: float, num_groups: int = 1
) -> float:
    """Return the noise multiplier z_D of the gradients under adaptive clipping.

    Adaptive clipping also releases a quantile count for each of M groups, with noise sigma_b. Each
    example adds +1/2 or -1/2 to every count, so z_D = (z^-2 - M (2 sigma_b)^-2)^(-1/2) (Andrew et
    al. 2021, arXiv:1905.03871, Theorem 1, for M = 1).

    Args:
        noise_multiplier: z > 0 of gradients and counts together, the z that is accounted for.
        count_noise: sigma_b > 0, standard deviation of the noise on each count.
        num_groups: M >= 0, the number of groups with an adaptive clip norm; 0 returns z itself.

    Raises:
        ValueError: a value is outside its range, or the counts alone spend all of z.
    """
    z = checks.positive("noise_multiplier", noise_multiplier)
    sigma_b = checks.positive("count_noise", count_noise)
    groups = checks.whole_number("num_groups", num_groups)
    share = groups * (0.5 * z / sigma_b) ** 2  # of the budget z^-2, spent on the counts
    if share >= 1.0:
        raise ValueError(
            f"count_noise must be > noise_multiplier sqrt(num_groups) / 2 = "
            f"{0.5 * z * math.sqrt(groups):.6g}, got {sigma_b!r}: the counts alone would spend "
            "the whole budget"
        )
    return z / math.sqrt(1.0 - share)


def adaptive_clip_total_noise_multiplier(
    gradient_noise_multiplier: float, count_noise: float, num_groups: int = 1
) -> float:
    """Return the noise multiplier z of gradients and quantile counts together.

    z = (z_D^-2 + M (2 sigma_b)^-2)^(-1/2), the inverse of `adaptive_clip_noise_multiplier`. Account
    with this z if z_D was chosen directly, without that function.

    Args:
        gradient_noise_multiplier: z_D > 0, the noise multiplier of the gradients alone.
        count_noise: sigma_b > 0, standard deviation of the noise on each count.
        num_groups: M >= 0, the number of groups with an adaptive clip norm.

    Raises:
        ValueError: an argument is outside its range.
    """
    z = checks.positive("gradient_noise_multiplier", gradient_noise_multiplier)
    sigma_b = checks.positive("count_noise", count_noise)
    groups = checks.whole_number("num_groups", num_groups)
    return z / math.sqrt(1.0 + groups * (0.5 * z / sigma_b) ** 2)


def _dimensions(dimensions: Sequence[int]) -> Floats:
    sizes = [checks.whole_number("dimensions", size) for size in dimensions]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"dimensions must be whole numbers >= 1, at least one, got {sizes!r}")
    return np.array(sizes, dtype=float)


def _positive_values(name: str, values: Sequence[float]) -> Floats:
    checked = [checks.positive(name, value) for value in values]
    if not checked:
        raise ValueError(f"{name} must hold at least one value, got none")
    return np.array(checked)

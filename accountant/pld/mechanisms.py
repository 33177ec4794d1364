"""The mechanisms that have a dominating pair, and their losses on a grid."""

from fedsim.accountant.composition import (
    AllocatedGaussian,
    Approximate,
    FixedSizeGaussian,
    ReplacedGaussian,
    SampledGaussian,
)
from fedsim.accountant.pld.loss_pmf import (
    LossPmf,
    loss_range,
    loss_variance,
    mirrored_pmf,
    mirrored_range,
    step_pmfs,
)
from fedsim.accountant.pld.random_allocation import (
    allocation_pmfs,
    allocation_range,
    allocation_variance,
)

Dominated = SampledGaussian | ReplacedGaussian | FixedSizeGaussian | AllocatedGaussian | Approximate


def mechanism_range(mechanism: Dominated) -> tuple[float, float]:
    """Return the least and largest loss of "remove": beyond lies less than 1e-20 of the mass."""
    match mechanism:
        case SampledGaussian():
            return loss_range(*mechanism)
        case AllocatedGaussian(batches, z):
            return allocation_range(batches, z)
        case _:
            return mirrored_range(mechanism)


def mechanism_variance(mechanism: Dominated) -> float:
    """Return the variance of the loss, roughly, enough to choose the grid."""
    match mechanism:
        case SampledGaussian():
            return loss_variance(*mechanism)
        case AllocatedGaussian(batches, z):
            return allocation_variance(batches, z)
        case ReplacedGaussian(q, z):
            return 4.0 * loss_variance(q, z)  # small losses are those of two examples added up
        case FixedSizeGaussian(q, z):
            return loss_variance(q, 0.5 * z)
        case Approximate(epsilon):
            return epsilon * epsilon


def mechanism_pmfs(mechanism: Dominated, spacing: float) -> tuple[LossPmf, LossPmf]:
    """Return the pmfs of the loss in the directions "remove" and "add".

    Guarantee: each pmf, taken as a privacy loss distribution, dominates its direction of the
    mechanism: delta(epsilon) is nowhere below the true one, except by rounding (1e-15).

    Args:
        mechanism: one run of it.
        spacing: the grid's spacing h > 0.
    """
    match mechanism:
        case SampledGaussian():
            return step_pmfs(*mechanism, spacing)
        case AllocatedGaussian(batches, z):
            return allocation_pmfs(batches, z, spacing)
        case _:
            pmf = mirrored_pmf(mechanism, spacing)
            return pmf, pmf

"""Rényi DP of many clients at once: curves of all mechanisms, epsilons of all totals."""

from collections.abc import Sequence

import numpy as np

from fedsim.accountant.arrays import Floats
from fedsim.accountant.composition import Mechanism, SampledGaussian
from fedsim.accountant.rdp.curves import mechanism_rdp
from fedsim.accountant.rdp.poisson_batch import is_supported, rdp_curves


def rdp_table(mechanisms: Sequence[Mechanism], orders: tuple[float, ...]) -> Floats:
    """Return the RDP of each mechanism, float64 (mechanisms, orders).

    Guarantee and values are those of `curves.mechanism_rdp`, to 1e-12 relative.

    Args:
        mechanisms: one run of each.
        orders: Rényi orders, each in (1, 65536].
    """
    table = np.empty((len(mechanisms), len(orders)))
    sampled = [i for i, kind in enumerate(mechanisms) if isinstance(kind, SampledGaussian)]
    pairs = np.array([mechanisms[i] for i in sampled], dtype=np.float64).reshape(-1, 2)
    rates, noises = pairs.T
    covered = is_supported(rates, noises, orders)
    batched = np.array(sampled, dtype=np.intp)[covered]
    table[batched] = rdp_curves(rates[covered], noises[covered], orders)
    for row in np.setdiff1d(np.arange(len(mechanisms)), batched):
        table[row] = mechanism_rdp(mechanisms[row], orders)
    return table


def epsilons_from_rdp(
    orders: Sequence[float], rdp: Floats, delta: float, leaks: Floats | None = None
) -> Floats:
    """Return the epsilon of every row of `rdp`: `conversion.epsilon_from_rdp`, "tight", for many.

    Args:
        orders: Rényi orders, each > 1.
        rdp: RDP at each order, a row per client, >= 0; infinity is allowed.
        delta: in (0, 1).
        leaks: the part of delta that each client has spent already, in [0, 1]; by default none.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    spent = np.zeros(rdp.shape[0]) if leaks is None else leaks
    left = (delta - spent) / np.maximum(1.0 - spent, 1e-300)
    with np.errstate(divide="ignore"):  # nothing left: epsilon is infinite
        cost = -np.log(np.maximum(left, 0.0))[:, None] - np.log(alphas)
    epsilons = (rdp + np.log1p(-1.0 / alphas) + cost / (alphas - 1.0)).min(axis=1)
    total_variation = np.sqrt(-np.expm1(-rdp.min(axis=1)))
    return np.where((left > 0.0) & (left >= total_variation), 0.0, np.maximum(0.0, epsilons))

"""From Rényi differential privacy to (epsilon, delta).

The conversion is Canonne, Kamath, Steinke 2020 (arXiv:2004.00010, Proposition 12), the tightest
known one per order that has a closed form; the same bound is Theorem 21 of Balle et al. 2020.
An RDP guarantee also bounds the total variation distance, through the Kullback-Leibler divergence
(Bretagnolle, Huber 1979): delta(0) <= sqrt(1 - exp(-RDP)). It decides when epsilon is 0.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.accountant import checks

Floats = NDArray[np.float64]


def epsilon_from_rdp(orders: Sequence[float], rdp: Floats, delta: float) -> tuple[float, float]:
    """Returns (epsilon, the order that gave it).

    Guarantee: a mechanism that is (orders[i], rdp[i])-RDP for every i is (epsilon, delta)-DP.

    Args:
        orders: Rényi orders, each > 1.
        rdp: the RDP at each order, >= 0; infinity is allowed.
        delta: in (0, 1).

    Raises:
        ValueError: `delta` is outside (0, 1), or the arrays are empty or of unequal length.
    """
    alphas, values = _aligned(orders, rdp)
    delta = checks.open_probability("delta", delta)
    least = int(np.argmin(values))
    if delta >= _total_variation(float(values[least])):
        return 0.0, float(alphas[least])
    epsilons = (
        values + np.log1p(-1.0 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1.0)
    )
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), float(alphas[best])


def delta_from_rdp(orders: Sequence[float], rdp: Floats, epsilon: float) -> tuple[float, float]:
    """Returns (delta, the order that gave it), the inverse of `epsilon_from_rdp`.

    Guarantee: a mechanism that is (orders[i], rdp[i])-RDP for every i is (epsilon, delta)-DP.

    Args:
        orders: Rényi orders, each > 1.
        rdp: the RDP at each order, >= 0; infinity is allowed.
        epsilon: finite, >= 0.

    Raises:
        ValueError: `epsilon` is negative, or the arrays are empty or of unequal length.
    """
    alphas, values = _aligned(orders, rdp)
    epsilon = checks.non_negative("epsilon", epsilon)
    log_deltas = (
        (alphas - 1.0) * (values - epsilon)
        + alphas * np.log1p(-1.0 / alphas)
        - np.log(alphas - 1.0)
    )
    best, least = int(np.argmin(log_deltas)), int(np.argmin(values))
    delta = math.exp(min(0.0, float(log_deltas[best])))
    total_variation = _total_variation(float(values[least]))
    if total_variation < delta:
        return total_variation, float(alphas[least])
    return delta, float(alphas[best])


def _aligned(orders: Sequence[float], rdp: Floats) -> tuple[Floats, Floats]:
    alphas, values = np.asarray(orders, dtype=float), np.asarray(rdp, dtype=float)
    if alphas.ndim != 1 or alphas.shape != values.shape or alphas.size == 0:
        raise ValueError(
            "orders and rdp must be two lists of one length >= 1, "
            f"got shapes {alphas.shape} and {values.shape}"
        )
    return alphas, values


def _total_variation(rdp: float) -> float:
    # Rényi divergence grows with its order, so any order > 1 bounds Kullback-Leibler (order 1).
    return math.sqrt(-math.expm1(-rdp))

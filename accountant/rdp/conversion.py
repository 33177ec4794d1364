"""Conversion from Rényi DP to (epsilon, delta), and interpolation of log moments between orders.

The conversion "tight", the default, is that of Canonne, Kamath, Steinke 2020 (arXiv:2004.00010,
Proposition 12). It is the tightest known closed form per order; Theorem 21 of Balle et al. 2020 is
the same bound. An RDP guarantee also bounds the total variation distance, through the
Kullback-Leibler divergence (Bretagnolle, Huber 1979): delta(0) <= sqrt(1 - exp(-RDP)). This bound
decides when epsilon is 0.

The conversion "mironov" is that of the moments accountant (Mironov 2017, arXiv:1702.07476,
Proposition 3): RDP + log(1/delta) / (alpha - 1). It is never below the tight conversion and serves
for comparison.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats

ConversionName = Literal["tight", "mironov"]


def check_conversion(value: str) -> ConversionName:
    """Return `value` if it is the name of a conversion; otherwise raise ValueError."""
    names: tuple[ConversionName, ...] = get_args(ConversionName)
    if value not in names:
        raise ValueError(f"conversion must be one of {list(names)}, got {value!r}")
    return value


def epsilon_from_rdp(
    orders: Sequence[float],
    rdp: Floats,
    delta: float,
    conversion: ConversionName = "tight",
    leak: float = 0.0,
) -> tuple[float, float]:
    """Return the epsilon of an RDP curve at `delta`, and the Rényi order that gives it.

    Guarantee: a mechanism that is (orders[i], rdp[i])-RDP for every i, except for an event of
    probability `leak`, is (epsilon, delta)-DP.

    Edge cases: epsilon is infinite if `leak` is at least `delta`.

    Args:
        orders: Rényi orders, each > 1.
        rdp: the RDP at each order, >= 0; infinity is allowed.
        delta: in (0, 1).
        conversion: "tight" or "mironov".
        leak: probability in [0, 1] that the data are revealed outright, see `curves.leak`.

    Raises:
        ValueError: `delta` is outside (0, 1), there is no such conversion, or the arrays are empty
            or of unequal length.

    Example:
        >>> from fedsim.accountant.rdp.conversion import epsilon_from_rdp
        >>> import numpy as np
        >>> orders = [2.0, 8.0, 32.0]
        >>> epsilon, order = epsilon_from_rdp(orders, np.array([0.25, 1.0, 4.0]), 1e-5)
        >>> round(epsilon, 3), order
        (2.214, 8.0)
    """
    alphas, values = _aligned(orders, rdp)
    delta = checks.open_probability("delta", delta)
    least = int(np.argmin(values))
    if delta <= leak:
        return math.inf, float(alphas[least])
    left = (delta - leak) / (1.0 - leak)
    if check_conversion(conversion) == "mironov":
        epsilons = values - math.log(left) / (alphas - 1.0)
    elif left >= _total_variation(float(values[least])):
        return 0.0, float(alphas[least])
    else:
        epsilons = (
            values + np.log1p(-1.0 / alphas) - (math.log(left) + np.log(alphas)) / (alphas - 1.0)
        )
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), float(alphas[best])


def delta_from_rdp(
    orders: Sequence[float],
    rdp: Floats,
    epsilon: float,
    conversion: ConversionName = "tight",
    leak: float = 0.0,
) -> tuple[float, float]:
    """Return the delta of an RDP curve at `epsilon`, and the Rényi order that gives it.

    Guarantee: a mechanism that is (orders[i], rdp[i])-RDP for every i, except for an event of
    probability `leak`, is (epsilon, delta)-DP. This function is the inverse of `epsilon_from_rdp`.

    Args:
        orders: Rényi orders, each > 1.
        rdp: the RDP at each order, >= 0; infinity is allowed.
        epsilon: finite, >= 0.
        conversion: "tight" or "mironov".
        leak: probability in [0, 1] that the data are revealed outright, see `curves.leak`.

    Raises:
        ValueError: `epsilon` is negative, there is no such conversion, or the arrays are empty or
            of unequal length.
    """
    alphas, values = _aligned(orders, rdp)
    epsilon = checks.non_negative("epsilon", epsilon)
    log_deltas = (alphas - 1.0) * (values - epsilon)
    total_variation = 1.0
    if check_conversion(conversion) == "tight":
        log_deltas += alphas * np.log1p(-1.0 / alphas) - np.log(alphas - 1.0)
        total_variation = _total_variation(float(values.min()))
    best = int(np.argmin(log_deltas))
    delta, order = math.exp(min(0.0, float(log_deltas[best]))), float(alphas[best])
    if total_variation < delta:
        delta, order = total_variation, float(alphas[int(np.argmin(values))])
    return leak + (1.0 - leak) * delta, order


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


def interpolate_log_moments(whole_orders: Floats, moments: Floats, orders: Floats) -> Floats:
    """Return the log moments at `orders`, interpolated linearly between whole orders.

    The log moment at an order is (order - 1) times the RDP.

    Args:
        whole_orders: increasing whole numbers >= 2; must contain floor and ceil of every order
            above 1 (order 1 itself is known: its moment is 0).
        moments: the log moment at each whole order; infinity is allowed.
        orders: Rényi orders > 1, one-dimensional.
    """
    low, high = np.floor(orders), np.ceil(orders)
    table = dict(zip((1.0, *whole_orders.tolist()), (0.0, *moments.tolist()), strict=True))
    at_low, at_high = (np.array([table[k] for k in side.tolist()]) for side in (low, high))
    part = orders - low
    with np.errstate(invalid="ignore"):  # 0 times infinity where the order is whole
        chord = (1.0 - part) * at_low + part * at_high
    return np.where(part == 0.0, at_low, chord)

"""The moments accountant as published (Abadi et al. 2016, arXiv:1607.00133).

alpha_M(lambda) = log E[exp(lambda L)] is the log moment of the privacy loss L of one step. It is
lambda times the Rényi divergence of order lambda + 1, so the accountant is Rényi DP at integer
orders with the older conversion (Mironov 2017, arXiv:1702.07476, Proposition 3).

Implementations often get the index wrong: the moment lambda belongs to the Rényi ORDER lambda + 1.
The functions here take orders, like the rest of the package. The log moment is K = (order - 1)
RDP(order). It is not (order - 1) RDP(order - 1), nor is it divided by the order.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.conversion import interpolate_log_moments
from fedsim.accountant.rdp.poisson import check_orders, rdp_sampled_gaussian

# lambda = 1 ... 31. "range(2, 32)", often copied, stops at 31.
MOMENTS_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 33))


def log_moments(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float] = MOMENTS_ORDERS
) -> Floats:
    """Return the log moments of the privacy loss of one Poisson-sampled Gaussian step.

    They are (order - 1) RDP(order), float64 (orders,). T steps have T times these values (Abadi et
    al., Theorem 2.1).

    Args:
        sampling_rate: inclusion probability q of each example, in [0, 1].
        noise_multiplier: z >= 0, noise standard deviation over the clipping norm; z = 0 gives
            infinity.
        orders: whole orders lambda + 1, each in [2, 65536]. `interpolated_log_moments` also takes
            other orders.

    Raises:
        ValueError: an argument is outside its range, or an order is not whole.
    """
    alphas = np.array(check_orders(tuple(orders)))
    broken = alphas[alphas != np.floor(alphas)]
    if broken.size:
        raise ValueError(
            f"orders must be whole numbers >= 2, got {float(broken[0])!r}; "
            "use interpolated_log_moments between them"
        )
    rdp = rdp_sampled_gaussian(sampling_rate, noise_multiplier, tuple(alphas))
    return (alphas - 1.0) * rdp


def interpolated_log_moments(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> Floats:
    """Return upper bounds of the log moments at any orders, by interpolation between whole orders.

    Guarantee: a bound is never below the exact moment and equals it at whole orders. The reason is
    that log moments are convex in lambda (Wang, Balle, Kasiviswanathan 2019, arXiv:1808.00087,
    Corollary 10) and 0 at order 1. The bound is up to 35 % too high near order 1.5, where
    `rdp_sampled_gaussian` is exact.

    Args are those of `log_moments`, except that orders are real numbers in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    alphas = np.array(check_orders(tuple(orders)))
    whole = np.unique(np.concatenate((np.floor(alphas), np.ceil(alphas), [2.0])))
    whole = whole[whole > 1.0]
    values = log_moments(sampling_rate, noise_multiplier, tuple(whole))
    return interpolate_log_moments(whole, values, alphas)


def moments_epsilon(orders: Sequence[float], moments: Floats, delta: float) -> tuple[float, float]:
    """Return the epsilon at `delta` of given log moments, and the order that gives it.

    Epsilon is min (K + log(1/delta)) / (order - 1) over the orders, with K the log moment.

    Guarantee: a mechanism with these log moments is (epsilon, delta)-DP (Abadi et al., Theorem
    2.2). The default conversion of `epsilon_from_rdp` never gives a larger epsilon.

    Args:
        orders: Rényi orders lambda + 1, each > 1.
        moments: total log moment K at each order, >= 0; infinity is allowed.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is outside its range or the shapes differ.
    """
    alphas, values = _aligned(orders, moments)
    log_delta = math.log(checks.open_probability("delta", delta))
    epsilons = (values - log_delta) / (alphas - 1.0)
    best = int(np.argmin(epsilons))
    return float(epsilons[best]), float(alphas[best])


def moments_delta(orders: Sequence[float], moments: Floats, epsilon: float) -> tuple[float, float]:
    """Return the delta at `epsilon` of given log moments, and the order that gives it.

    Delta is min exp(K - (order - 1) epsilon) over the orders, at most 1; K is the log moment.

    Guarantee: a mechanism with these log moments is (epsilon, delta)-DP. The function is the
    inverse of `moments_epsilon` and has the same errors.

    Args:
        orders: Rényi orders lambda + 1, each > 1.
        moments: total log moment K at each order, >= 0; infinity is allowed.
        epsilon: finite, >= 0.
    """
    alphas, values = _aligned(orders, moments)
    epsilon = checks.non_negative("epsilon", epsilon)
    log_deltas = values - (alphas - 1.0) * epsilon
    best = int(np.argmin(log_deltas))
    return math.exp(min(0.0, float(log_deltas[best]))), float(alphas[best])


def approx_log_moment(sampling_rate: float, noise_multiplier: float, moment: int) -> float:
    """Return the leading term of a log moment, q^2 lambda (lambda + 1) / ((1 - q) z^2).

    The term is NOT a bound: Abadi et al., Lemma 3 adds O(q^3 lambda^3 / z^3) with unknown constant.
    Outside the lemma's conditions, which are refused here, it is far too low: at q = 0.01, z = 1 by
    a factor 2 for lambda = 8 and 3500 for lambda = 31. Inside them it is typically up to twice too
    high.

    Args:
        sampling_rate: the sampling rate q in (0, 1), below 1/(16 z).
        noise_multiplier: the noise multiplier z >= 1.
        moment: the moment lambda >= 1, whole, at most z^2 log(1/(q z)).

    Raises:
        ValueError: an argument is outside its range, or a condition of the lemma fails.
    """
    q = checks.open_probability("sampling_rate", sampling_rate)
    z = checks.positive("noise_multiplier", noise_multiplier)
    lam = checks.whole_number("moment", moment)
    if z < 1.0:
        raise ValueError(f"noise_multiplier must be >= 1 here, got {z!r}")
    if q >= 1.0 / (16.0 * z):
        raise ValueError(f"sampling_rate must be < 1/(16 z) = {1 / (16 * z):.6g} here, got {q!r}")
    largest = z * z * -math.log(q * z)
    if not 1 <= lam <= largest:
        raise ValueError(
            f"moment must be between 1 and z^2 log(1/(q z)) = {largest:.6g}, got {lam!r}"
        )
    return q * q * lam * (lam + 1) / ((1.0 - q) * z * z)


def _aligned(orders: Sequence[float], moments: Floats) -> tuple[Floats, Floats]:
    alphas, values = np.array(check_orders(tuple(orders))), np.asarray(moments, dtype=float)
    if alphas.shape != values.shape:
        raise ValueError(
            f"orders and moments must have the same shape, got {alphas.shape} and {values.shape}"
        )
    if not np.all(values >= 0.0):
        raise ValueError(f"moments must be >= 0, got {float(values[~(values >= 0.0)][0])!r}")
    return alphas, values

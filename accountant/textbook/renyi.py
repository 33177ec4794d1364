"""Rényi divergence of two Gaussians, and two worked examples.

The divergence of order a is D_a(P || Q) = log E_Q[(P/Q)^a] / (a - 1); it increases in a.
References: van Erven, Harremoës 2014, arXiv:1206.2459; Gil, Alajaji, Linder 2013 (Gaussians); Wang,
Balle, Kasiviswanathan 2019, arXiv:1808.00087, examples 19 and 20 (WBK).
"""

import math
from collections.abc import Sequence

import numpy as np

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.poisson import check_orders


def renyi_gaussians(
    order: float, mean_p: float, std_p: float, mean_q: float, std_q: float
) -> float:
    """Return the Rényi divergence D_order(N(mean_p, std_p^2) || N(mean_q, std_q^2)).

    With order a and s^2 = (1 - a) std_p^2 + a std_q^2 the divergence is a (mean_p - mean_q)^2 / (2
    s^2) + log(s / (std_p^(1-a) std_q^a)) / (1 - a), to full precision at every order. The logarithm
    contains s, not s^2; with s^2 divergences would be negative.

    Edge cases: order 0 gives 0 (both have full support), order 1 gives the Kullback-Leibler
    divergence, and order infinity gives the largest log ratio of the densities. The result is
    infinite where s^2 <= 0, as the defining integral diverges there.

    Args:
        order: the Rényi order a >= 0; infinity is allowed.
        mean_p: mean of P, finite.
        std_p: standard deviation of P, > 0.
        mean_q: mean of Q, finite.
        std_q: standard deviation of Q, > 0.

    Raises:
        ValueError: an argument is outside its range.
    """
    order = checks.real_number("order", order)
    if order < 0.0:
        raise ValueError(f"order must be >= 0, got {order!r}")
    std_p, std_q = checks.positive("std_p", std_p), checks.positive("std_q", std_q)
    shift = _finite("mean_p", mean_p) - _finite("mean_q", mean_q)
    if order == math.inf:
        return _largest_log_ratio(shift, std_p, std_q)
    if order < 0.5:  # skew symmetry: keeps all digits as the order goes to 0
        return order / (1.0 - order) * _from_half(1.0 - order, shift, std_q, std_p)
    return _from_half(order, shift, std_p, std_q)


def _from_half(order: float, shift: float, std_p: float, std_q: float) -> float:
    """Return the divergence for order >= 1/2, with no singularity at order 1.

    In units of std_q^2, s^2 is 1 + b w with b = 1 - order and w = (std_p/std_q)^2 - 1, and the
    second term is (log1p(b w)/b - log1p(w)) / 2.
    """
    ratio = std_p / std_q
    w = (ratio - 1.0) * (ratio + 1.0)
    spread = 1.0 + (1.0 - order) * w
    if spread <= 0.0:
        return math.inf
    scaled = shift / std_q
    return order * scaled * scaled / (2.0 * spread) + _spread_term(order, w)


def _spread_term(order: float, w: float) -> float:
    b = 1.0 - order
    if max(abs(w), abs(b * w)) < 1e-2:
        # sum over k >= 2 of (-1)^k (1 - b^(k-1)) w^k / (2k): the two logarithms would cancel.
        return sum((-1) ** k * (1.0 - b ** (k - 1)) * w**k / (2 * k) for k in range(2, 11))
    first = w if b == 0.0 else math.log1p(b * w) / b
    return max(0.0, 0.5 * (first - math.log1p(w)))


def _largest_log_ratio(shift: float, std_p: float, std_q: float) -> float:
    if shift == 0.0 and std_p == std_q:
        return 0.0
    if std_p >= std_q:
        return math.inf
    return math.log(std_q / std_p) + shift**2 / (2.0 * (std_q - std_p) * (std_q + std_p))


def _finite(name: str, value: float) -> float:
    number = checks.real_number(name, value)
    if math.isinf(number):
        raise ValueError(f"{name} must be finite, got {number!r}")
    return number


def bad_case_rdp_clt(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> Floats:
    """Return the approximate RDP of the bad case in WBK, float64 (orders,), for teaching only.

    WBK is Wang, Balle, Kasiviswanathan 2019. Of n examples of value -C one is replaced by +C, and
    the sum of m = q n examples drawn without replacement is released with noise z C. The exact RDP
    is `rdp_without_replacement_lower_bound`. The approximation replaces its two-point mixture by a
    Gaussian: N(q, q (1-q) + s^2) is compared with N(0, s^2), where s = z/2. It is neither an upper
    nor a lower bound. From order 1 + s^2/(q (1-q)) on it is infinite, where the exact RDP is not.

    Args:
        sampling_rate: q = m/n in [0, 1].
        noise_multiplier: z > 0, standard deviation over C (not over 2C).
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    q = checks.probability("sampling_rate", sampling_rate)
    s = 0.5 * checks.positive("noise_multiplier", noise_multiplier)
    wide = math.hypot(s, math.sqrt(q * (1.0 - q)))
    alphas = check_orders(tuple(orders))
    return np.array([renyi_gaussians(order, q, wide, 0.0, s) for order in alphas])


def good_case_rdp_clt(
    sample_size: int, dataset_size: int, noise_multiplier: float, orders: Sequence[float]
) -> Floats:
    """Return the approximate RDP of the good case in WBK, float64 (orders,), for teaching only.

    WBK is Wang, Balle, Kasiviswanathan 2019. The number n of examples is odd, and the values +C and
    -C are balanced except for the replaced example. So the sampling itself hides that example. In
    units of 2C the sum of m = q n examples drawn without replacement has variance q (1-q) (n+1)/4.
    One replacement moves its mean by q. With s = z/2 the approximation by two Gaussians is order
    q^2 / (2 (s^2 + q (1-q) (n+1)/4)).

    Some texts have (n - 1/n) in place of (n+1); the two differ by a factor 1 - 1/n.

    Args:
        sample_size: number of drawn examples m, whole, at most n.
        dataset_size: number of examples n, odd.
        noise_multiplier: z > 0, standard deviation over C (not over 2C).
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    m = checks.whole_number("sample_size", sample_size)
    n = checks.whole_number("dataset_size", dataset_size)
    s = 0.5 * checks.positive("noise_multiplier", noise_multiplier)
    if n % 2 == 0:
        raise ValueError(f"dataset_size must be odd, for a balanced data set, got {n!r}")
    if m > n:
        raise ValueError(f"sample_size must be <= dataset_size = {n}, got {m!r}")
    q = m / n
    variance = s * s + q * (1.0 - q) * (n + 1) / 4.0
    return np.array(check_orders(tuple(orders))) * q * q / (2.0 * variance)

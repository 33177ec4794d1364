"""Curves of RDP without replacement that are published, beside which fedsim's own is shown.

The curves are of the Gaussian mechanism on m of n examples, drawn without replacement, under
replace-one adjacency; q = m/n. With z the noise over C, every formula uses z_r = z / 2, as in
`fedsim.accountant.rdp.without_replacement`, and the curves satisfy

    rdp_lower_bound <= rdp_without_replacement <= rdp_tightened <= rdp_published

References: Wang, Balle, Kasiviswanathan 2019, arXiv:1808.00087 (WBK), with examples 19 and 20; van
Erven, Harremoës 2014, arXiv:1206.2459, and Gil, Alajaji, Linder 2013 for the Rényi divergence of
order a, D_a(P || Q) = log E_Q[(P/Q)^a] / (a - 1), of two Gaussians.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.conversion import interpolate_log_moments
from fedsim.accountant.rdp.poisson import check_orders, rdp_sampled_gaussian

_MAX_TIGHTENED = 256  # beyond, only the published terms are summed, as in dp-accounting
_LEAST_NOISE = 1e-3  # below this z_r the bounds are those of the unsampled Gaussian


def rdp_published(sampling_rate: float, noise_multiplier: float, orders: Sequence[float]) -> Floats:
    """Return the RDP bound of Wang, Balle, Kasiviswanathan 2019 (arXiv:1808.00087), Theorem 9.

    With order a, z_r = z / 2, g(j) = j / (2 z_r^2) (the paper's epsilon(j), infinite for j =
    infinity) and binomial coefficients C(a, j), the log moment (a - 1) RDP(a) is
    log(1 + q^2 C(a, 2) min{4 (exp(g(2)) - 1), 2 exp(g(2))} + sum over j >= 3 of
    2 q^j C(a, j) exp((j-1) g(j))). As published the bound may exceed even that of the unsampled
    Gaussian for large q. Between whole orders the log moment is interpolated (the paper's
    Corollary 10).

    Args, edge cases and errors are those of `rdp_without_replacement`.
    """
    return _summed(sampling_rate, noise_multiplier, orders, tightened=False)


def rdp_tightened(sampling_rate: float, noise_multiplier: float, orders: Sequence[float]) -> Floats:
    """Return the tightened RDP bound of arXiv:1808.00087, Theorem 27, which dp-accounting uses.

    The notation is that of `rdp_published`, whose terms j >= 3 change. The factor 2 exp((j-1) g(j))
    becomes its minimum with 4 sqrt(B(2 floor(j/2)) B(2 ceil(j/2))), where B(l) = |sum over i of
    (-1)^i C(l, i) e^(i (i-1) / (2 z_r^2))|. For even l, B(l) is E[(N(1)/N(0) - 1)^l] under
    N(0, z_r^2). B is computed as an integral, since the sum cancels.

    Args, edge cases and errors are those of `rdp_without_replacement`.
    """
    return _summed(sampling_rate, noise_multiplier, orders, tightened=True)


def rdp_lower_bound(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> Floats:
    """Return a LOWER bound of the worst-case RDP (arXiv:1808.00087, Proposition 11); no guarantee.

    A data set attains the bound if all examples are -C except a single +C, with clipping norm C.
    The bound equals the RDP of Poisson sampling at half the noise multiplier, z_r = z / 2.

    Args, edge cases and errors are those of `rdp_without_replacement`.
    """
    q, z_r, alphas = _checked(sampling_rate, noise_multiplier, orders)
    return rdp_sampled_gaussian(q, z_r, tuple(alphas.tolist()))


def _checked(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> tuple[float, float, Floats]:
    q = checks.probability("sampling_rate", sampling_rate)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    # Outside these limits less noise or more sampling is assumed: still a bound, no underflow.
    z_r, q = min(0.5 * z, 1e50), max(q, 1e-100) if q else 0.0
    return q, z_r, np.array(check_orders(tuple(orders)))


def _gaussian_rdp(z_r: float, alphas: Floats) -> Floats:
    return alphas * (0.5 / z_r / z_r) if z_r > 1e-100 else np.full_like(alphas, math.inf)


def _log_sum(values: Floats) -> float:
    return float(np.asarray(logsumexp(values)))


def _summed(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float], *, tightened: bool
) -> Floats:
    q, z_r, alphas = _checked(sampling_rate, noise_multiplier, orders)
    if q in (0.0, 1.0) or z_r < _LEAST_NOISE:
        return _gaussian_rdp(z_r, alphas) if q > 0.0 else np.zeros_like(alphas)
    whole = np.unique(np.concatenate((np.floor(alphas), np.ceil(alphas))))
    whole = whole[whole > 1.0]
    moments = _log_moments(whole, q, z_r, tightened)
    return interpolate_log_moments(whole, moments, alphas) / (alphas - 1.0)


def _log_moments(whole: Floats, q: float, z_r: float, tightened: bool) -> Floats:
    """Return the log moment at each whole order >= 2."""
    result = np.empty_like(whole)
    sharp = _log_factors(int(min(whole.max(), _MAX_TIGHTENED)), z_r, tightened)
    plain = _log_factors(int(whole.max()), z_r, False) if whole.max() > _MAX_TIGHTENED else sharp
    for index, order in enumerate(whole.tolist()):
        j = np.arange(2.0, order + 1.0)
        factors = (sharp if order <= _MAX_TIGHTENED else plain)[: j.size]
        log_choose = gammaln(order + 1.0) - gammaln(j + 1.0) - gammaln(order - j + 1.0)
        result[index] = np.logaddexp(0.0, _log_sum(j * math.log(q) + log_choose + factors))
    return result


def _log_factors(largest: int, z_r: float, tightened: bool) -> Floats:
    """Return the log of the factor of q^j C(a, j) in the sum, for j = 2 ... largest."""
    j = np.arange(2.0, largest + 1.0)
    inverse = 0.5 / z_r / z_r
    factors = math.log(2.0) + j * (j - 1.0) * inverse
    if tightened:
        even = np.array([_log_even_moment(2 * k, z_r) for k in range(1, (largest + 1) // 2 + 1)])
        low, high = (j // 2).astype(int) - 1, ((j + 1) // 2).astype(int) - 1
        factors = np.minimum(factors, math.log(4.0) + 0.5 * (even[low] + even[high]))
    first = 2.0 * inverse  # e(2); log(4 (e^x - 1)) without overflow
    log_four_expm1 = math.log(4.0) + first + math.log(-math.expm1(-first))
    factors[0] = min(log_four_expm1, math.log(2.0) + first)
    return factors


@lru_cache(maxsize=4096)
def _log_even_moment(power: int, z_r: float) -> float:
    """Return log E[(e^L - 1)^power] under N(0, z_r^2), L = (x - 1/2) / z_r^2, for even powers.

    It uses the trapezoid rule; its error relative to sum C(l, i) e^(i (i-1) / (2 z_r^2)) is
    exp(-2 pi^2 z_r^2 / h^2), and h is taken small enough for the sum's cancellation.

    Where the last term of that sum is more than twice all others the result is infinite: then
    B >= e^(l (l-1) / (2 z_r^2)) / 2, and the published factor is the smaller one.
    """
    if (power - 1) / z_r / z_r > math.log(2.0 * power):
        return math.inf
    width = math.sqrt(power) + 9.0
    cancellation = 40.0 + power * math.log(4.0 + 2.0 * z_r)
    h = z_r * math.pi * math.sqrt(2.0 / cancellation)
    x = np.arange(-z_r * width, power + z_r * width, h)
    exponent = (x - 0.5) / z_r / z_r
    with np.errstate(divide="ignore"):  # the integrand is 0 at x = 1/2
        size = np.where(
            exponent < 1.0,
            np.log(np.abs(np.expm1(np.minimum(exponent, 1.0)))),
            exponent + np.log1p(-np.exp(-np.maximum(exponent, 1.0))),
        )
    log_density = -0.5 * (x / z_r) ** 2 - math.log(z_r * math.sqrt(2.0 * math.pi))
    return _log_sum(power * size + log_density) + math.log(h)


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
    is `rdp_lower_bound`. The approximation replaces its two-point mixture by a Gaussian: N(q,
    q (1-q) + s^2) is compared with N(0, s^2), where s = z/2. It is neither an upper nor a lower
    bound. From order 1 + s^2/(q (1-q)) on it is infinite, where the exact RDP is not.

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

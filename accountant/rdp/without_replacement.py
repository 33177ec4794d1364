"""RDP of the Gaussian mechanism on a sample without replacement, under REPLACE-ONE adjacency.

HALF THE NOISE. Everywhere in this package z is the noise over C, the clipping norm of one example.
Here one example replaces another, which moves the sum by 2C. So every formula below uses
z_r = z / 2: callers pass z and this module halves it. (dp-accounting's event for this sampling
takes z_r instead; passing z to it is a common and large error.)

Of n examples m are drawn without replacement, q = m/n. Zero-out and add-remove adjacency are NOT
covered: if an example is missing, another one is drawn instead. The module computes four RDP
curves, which satisfy:

    rdp_without_replacement_lower_bound <= rdp_without_replacement
    <= rdp_without_replacement_tightened <= rdp_without_replacement_published

Derivation of `rdp_without_replacement`. Balle, Barthe, Gaboardi 2018 (arXiv:1807.01647),
Theorem 9: for t >= 1 and any neighbours, in either order, the hockey-stick divergence of the
sampled mechanism satisfies
    H_t <= q H_{1 + (t-1)/q}(N(1, z_r^2) || N(0, z_r^2)) = h(t).
The right side equals H_t((1-q) N(0) + q N(1) || N(0)): expand (p - t p0)_+. Let X = P/Q be the
likelihood ratio. X^a is 1 + a (X-1) plus the integral of a (a-1) t^(a-2) times (X - t)_+ over
t > 1 and times (t - X)_+ over t < 1. As E_Q[(X - t)_+] = H_t(P||Q) and
E_Q[(t - X)_+] = t H_{1/t}(Q||P), bounding both by h and substituting 1/t for t in the second part
gives
    E_Q[X^a] <= 1 + a (a-1) * integral over t > 1 of (t^(a-2) + t^(-a-1)) h(t) dt.
h is an expectation over N(0, z_r^2) of r(x) = 1 - q + q N(1)/N(0), so both integrals over t can be
computed first. They give r^a - 1 - a (r-1) and r^(1-a) - 1 + (a-1) (r-1), hence
    E_Q[X^a] - 1 <= integral over x > 1/2 (where r > 1) of N(x; 0, z_r^2) times the sum of the two.
All terms are non-negative. At q = 1 the bound is the Gaussian's own RDP.
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

# At these orders the published sums are practical; `rdp_without_replacement` takes any order.
WOR_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 65))

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_NEGLIGIBLE = 46.0  # exp(-46) = 1e-20 of the integrand's maximum
_MAX_PANELS = 1 << 14
_MAX_TIGHTENED = 256  # beyond, only the published terms are summed, as in dp-accounting
_LEAST_NOISE = 1e-3  # below this z_r the bounds are those of the unsampled Gaussian


def rdp_without_replacement(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float] = WOR_ORDERS
) -> Floats:
    """Return the tightest proven RDP of a step sampled without replacement, float64 (orders,).

    Guarantee: one step that draws m = q n of n examples without replacement and releases their
    clipped sum with noise z C is (orders[i], result[i])-RDP for every i, if one example is
    REPLACED. The derivation is in the module's docstring. Zhu, Dong, Wang 2022 (arXiv:2106.08567,
    section on sampling without replacement) state the same inequality on privacy profiles.

    Precision: 1e-9 relative. Edge cases: q = 0 gives 0, q = 1 gives the Gaussian 2 order / z^2, and
    z = 0 gives infinity. For z < 0.002 the result is the RDP at q = 1, an upper bound.

    Args:
        sampling_rate: q = m/n in [0, 1].
        noise_multiplier: z >= 0, noise standard deviation over C (not over 2C).
        orders: Rényi orders, each in (1, 65536]; need not be whole.

    Raises:
        ValueError: an argument is outside its range.
    """
    q, z_r, alphas = _checked(sampling_rate, noise_multiplier, orders)
    gaussian = _gaussian_rdp(z_r, alphas)
    if q in (0.0, 1.0) or z_r < _LEAST_NOISE:
        return gaussian if q > 0.0 else np.zeros_like(alphas)
    moments = np.array([_log_dominating_moment(order, q, z_r) for order in alphas.tolist()])
    return np.minimum(gaussian, moments / (alphas - 1.0))


def rdp_without_replacement_published(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float] = WOR_ORDERS
) -> Floats:
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


def rdp_without_replacement_tightened(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float] = WOR_ORDERS
) -> Floats:
    """Return the tightened RDP bound of arXiv:1808.00087, Theorem 27, which dp-accounting uses.

    The notation is that of `rdp_without_replacement_published`, whose terms j >= 3 change. The
    factor 2 exp((j-1) g(j)) becomes its minimum with 4 sqrt(B(2 floor(j/2)) B(2 ceil(j/2))), where
    B(l) = |sum over i of (-1)^i C(l, i) e^(i (i-1) / (2 z_r^2))|. For even l, B(l) is E[(N(1)/N(0)
    - 1)^l] under N(0, z_r^2). B is computed as an integral, since the sum cancels.

    Args, edge cases and errors are those of `rdp_without_replacement`.
    """
    return _summed(sampling_rate, noise_multiplier, orders, tightened=True)


def rdp_without_replacement_lower_bound(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float] = WOR_ORDERS
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


# --- The dominating pair ------------------------------------------------------------------------


def _log_dominating_moment(order: float, q: float, z_r: float) -> float:
    """Return log of 1 + the integral over x > 1/2, by Gauss-Legendre on panels of width ~ z_r.

    The integrand is a polynomial in Gaussians of width z_r; its nearest singularity, r = 0, lies
    pi z_r^2 off the real axis, more than three half-panels away.
    """
    if order / z_r > 8.0 * _MAX_PANELS:
        return math.inf  # the unsampled Gaussian is as good there
    scan = np.arange(0.5, order + 12.0 * z_r + 0.5, 0.5 * z_r)
    height = _log_integrand(scan, order, q, z_r)
    active = scan[height > height.max() - _NEGLIGIBLE]
    low, high = max(0.5, active[0] - 0.5 * z_r), active[-1] + 0.5 * z_r
    panels = math.ceil((high - low) / min(z_r, 2.0 * z_r * z_r))
    if panels > _MAX_PANELS:
        return math.inf
    half = 0.5 * (high - low) / panels
    centres = low + half * (2.0 * np.arange(panels) + 1.0)
    x = (centres[:, None] + half * _NODES).ravel()
    log_values = _log_integrand(x, order, q, z_r) + np.tile(np.log(_WEIGHTS * half), panels)
    return float(np.logaddexp(0.0, _log_sum(log_values)))


def _log_integrand(x: Floats, order: float, q: float, z_r: float) -> Floats:
    exponent = (x - 0.5) / z_r / z_r  # >= 0
    u = q * np.expm1(np.minimum(exponent, 500.0))
    log_r = np.where(exponent < 500.0, np.log1p(u), math.log(q) + exponent)
    both = np.logaddexp(_log_gap(u, log_r, order), _log_gap(u, log_r, 1.0 - order))
    return both - 0.5 * (x / z_r) ** 2 - math.log(z_r * math.sqrt(2.0 * math.pi))


def _log_gap(u: Floats, log_r: Floats, power: float) -> Floats:
    """Return log((1+u)^power - 1 - power u) for u >= 0 and power outside [0, 1]."""
    near = u * max(abs(power) + 1.0, 2.0) < 1e-2
    small = np.where(near, u, 0.0)
    series = np.ones_like(u)
    for j in range(9, 2, -1):
        series = 1.0 + (power - j + 1.0) / j * small * series
    # r (e^(b L) - 1 + b (e^-L - 1)) with L = log r and b = power - 1: no overflow in r.
    exponent = (power - 1.0) * log_r
    general = np.expm1(np.minimum(exponent, 500.0)) + (power - 1.0) * np.expm1(-log_r)
    with np.errstate(divide="ignore"):  # u = 0: the gap is 0
        log_series = np.log(0.5 * power * (power - 1.0) * small * small * series)
        log_general = np.where(exponent < 500.0, np.log(np.maximum(general, 0.0)), exponent)
    return np.where(near, log_series, log_r + log_general)


# --- The published sums -------------------------------------------------------------------------


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

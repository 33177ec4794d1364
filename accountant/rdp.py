"""Rényi differential privacy (RDP) of the Poisson-sampled Gaussian mechanism.

Notation: mu0 = N(0, z^2), mu1 = N(1, z^2), r(x) = 1 - q + q mu1(x)/mu0(x). One step has
RDP(alpha) = log(A_alpha) / (alpha - 1) with A_alpha = E_mu0[r^alpha] (Mironov, Talwar, Zhang 2019,
arXiv:1908.10530, Theorem 4 and section 3.3); this direction dominates the other one (Theorem 5).
Everything is computed as A_alpha - 1, a sum or an integral of non-negative terms, so nothing
cancels however small the loss is.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from fedsim.accountant import checks

Floats = NDArray[np.float64]

# Fine below 2, where the best order lies once epsilon is above 15; long, because it lies above
# 64 once epsilon is below 0.3.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1.0 + k / 20 for k in range(1, 20)),
    *(k / 4 for k in range(8, 44) if k % 4),
    *(float(k) for k in range(2, 65)),
    *(80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0),
)

_MAX_ORDER = 65536.0  # the sum over k has as many terms
_MAX_NODES = 1 << 20  # quadrature nodes; reached only where the loss is astronomical
_NEGLIGIBLE = 46.0  # exp(-46) = 1e-20 of the integrand's maximum


def rdp_sampled_gaussian(
    sampling_rate: float,
    noise_multiplier: float,
    orders: Sequence[float] = DEFAULT_ORDERS,
) -> Floats:
    """Returns the RDP of one Poisson-sampled Gaussian step, read-only, one value per order.

    Guarantee: the step is (alpha, value)-RDP under zero-out and add-remove adjacency, each
    example moving the sum by at most 1 in L2 norm before noise of standard deviation z.

    Precision: 1e-9 relative at every order. For z below about 1e-4 fractional orders fall back
    to the unsampled bound alpha / (2 z^2), which never under-reports.

    Edge cases: q = 0 gives 0, q = 1 the closed form alpha / (2 z^2), z = 0 infinity.

    Args:
        sampling_rate: inclusion probability q of each example, in [0, 1].
        noise_multiplier: z >= 0, standard deviation of the noise over the sensitivity.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    q = checks.probability("sampling_rate", sampling_rate)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    return _curve(q, z, checked_orders(tuple(orders)))


@lru_cache(maxsize=64)
def checked_orders(orders: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the orders as floats.

    Raises:
        ValueError: there are none, or one is not in (1, 65536].
    """
    if not orders:
        raise ValueError("orders must not be empty")
    values = tuple(checks.real_number("orders", order) for order in orders)
    for value in values:
        if not 1.0 < value <= _MAX_ORDER:
            raise ValueError(f"orders must lie in (1, {_MAX_ORDER:.0f}], got {value!r}")
    return values


@lru_cache(maxsize=4096)
def _curve(q: float, z: float, orders: tuple[float, ...]) -> Floats:
    alphas = np.array(orders)
    if q == 0.0:
        curve = np.zeros_like(alphas)
    elif z < 1e-100:
        curve = np.full_like(alphas, math.inf)
    else:
        # Beyond these, less noise or more sampling is assumed: a bound, and no square underflows.
        z, q = min(z, 1e50), max(q, 1e-100)
        curve = alphas * (0.5 / z / z)  # sampling never hurts
        if q < 1.0:
            whole = alphas == np.floor(alphas)
            log_a = np.empty_like(alphas)
            log_a[whole] = _log_moments_whole(alphas[whole], q, z)
            log_a[~whole] = [_log_moment_fractional(a, q, z) for a in alphas[~whole]]
            curve = np.minimum(curve, log_a / (alphas - 1.0))
    curve.setflags(write=False)
    return curve


def _log_moments_whole(alphas: Floats, q: float, z: float) -> Floats:
    """Returns log A at integer orders, from the binomial expansion of r^alpha.

    A - 1 = sum over k >= 2 of C(alpha, k) (1-q)^(alpha-k) q^k expm1((k^2 - k) / (2 z^2)): the
    terms k = 0 and 1, and the "1" of each exponential, add up to exactly 1 and are left out.
    """
    result = np.empty_like(alphas)
    small = alphas <= 64
    if small.any():  # one matrix; a few large orders would make it mostly padding
        result[small] = _log_moments_block(alphas[small], q, z)
    for index in np.flatnonzero(~small):
        result[index] = _log_moments_block(alphas[index : index + 1], q, z)[0]
    return result


def _log_moments_block(alphas: Floats, q: float, z: float) -> Floats:
    k = np.arange(2.0, alphas.max() + 1.0)
    step = k * math.log(q) + _log_expm1(k * (k - 1.0) * (0.5 / z / z))
    rest = alphas[:, None] - k
    inside = rest >= 0
    rest = np.where(inside, rest, 0.0)
    terms = gammaln(alphas + 1.0)[:, None] - gammaln(k + 1.0) - gammaln(rest + 1.0)
    terms += rest * math.log1p(-q) + step
    return np.logaddexp(0.0, logsumexp(np.where(inside, terms, -np.inf), axis=1))


def _log_expm1(x: Floats) -> Floats:
    small, large = np.minimum(x, 1.0), np.maximum(x, 1.0)
    return np.where(x < 1.0, np.log(np.expm1(small)), large + np.log1p(-np.exp(-large)))


def _log_moment_fractional(alpha: float, q: float, z: float) -> float:
    """Returns log A by the trapezoid rule on mu0 (r^alpha - 1 - alpha (r - 1)) >= 0.

    E_mu0[r] = 1, so the integral is A - 1. The rule converges geometrically in the distance of
    the nearest singularity, r = 0, which lies pi z^2 off the real axis.
    """
    bound = alpha * (alpha - 1.0) * (0.5 / z / z)
    if alpha / z > _MAX_NODES / 4:
        return bound
    scan = np.arange(-10.0 * z, alpha + 10.5 * z, z / 2)
    height = _log_integrand(scan, alpha, q, z)
    active = scan[height > height.max() - _NEGLIGIBLE]
    low, high = active[0] - z / 2, active[-1] + z / 2
    corner = 0.5 + z * z * (math.log1p(-q) - math.log(q))  # real part of the singularity
    near = low - z < corner < high + z
    spacing = min(z / 7, z * z / 2) if near else z / 7
    nodes = math.ceil((high - low) / spacing)
    if nodes > _MAX_NODES:
        return bound
    x = low + spacing * np.arange(nodes + 1)
    log_excess = float(logsumexp(_log_integrand(x, alpha, q, z))) + math.log(spacing)
    return float(np.logaddexp(0.0, log_excess))


def _log_integrand(x: Floats, alpha: float, q: float, z: float) -> Floats:
    """Returns log of mu0(x) (r^alpha - 1 - alpha (r - 1)), -inf where it is 0."""
    exponent = (x - 0.5) / z / z
    u = q * np.expm1(np.minimum(exponent, 500.0))
    log_r = np.where(exponent < 500.0, np.log1p(u), math.log(q) + exponent)
    log_gap = _log_bernoulli_gap(u, log_r, alpha)
    return log_gap - 0.5 * (x / z) ** 2 - math.log(z * math.sqrt(2.0 * math.pi))


def _log_bernoulli_gap(u: Floats, log_r: Floats, alpha: float) -> Floats:
    """Returns log((1+u)^alpha - 1 - alpha u), with log_r = log1p(u), to full relative precision.

    In general it is log_r + log(expm1(b log_r) + b expm1(-log_r)) with b = alpha - 1, which
    depends on log_r only; where alpha u is small that cancels and the Taylor series takes over.
    """
    b = alpha - 1.0
    power = b * log_r
    near = np.abs(u) * max(alpha, 2.0) < 1e-2
    small = np.where(near, u, 0.0)
    series = np.ones_like(u)
    for j in range(9, 2, -1):
        series = 1.0 + (alpha - j + 1.0) / j * small * series
    # expm1(700) is the largest that is finite; from 500 on the other part is below exp(-500).
    general = np.expm1(np.minimum(power, 500.0)) + b * np.expm1(-log_r)
    with np.errstate(divide="ignore"):  # u = 0: the gap is 0
        log_series = np.log(0.5 * alpha * b * small * small * series)
        log_general = log_r + np.where(power < 500.0, np.log(np.maximum(general, 0.0)), power)
    return np.where(near, log_series, log_general)

"""Rényi differential privacy (RDP) of the Poisson-sampled Gaussian mechanism.

For sampling rate q and noise multiplier z, let mu0 = N(0, z^2), mu1 = N(1, z^2) and
r(x) = 1 - q + q mu1(x)/mu0(x). One step has RDP(alpha) = log(A_alpha) / (alpha - 1) with
A_alpha = E_mu0[r^alpha] (Mironov, Talwar, Zhang 2019, arXiv:1908.10530, Theorem 4 and section 3.3).
This direction dominates the other one (Theorem 5). Everything is computed as A_alpha - 1, a sum or
an integral of non-negative terms. So nothing cancels, even if the loss is tiny.

Under replace-one adjacency the pair is P = (1-q) mu0 + q mu1 against its mirror image Q = (1-q)
mu0 + q N(-1, z^2). `loss_pmf` proves that this pair dominates. Then r is P/Q, and the mean is taken
under Q.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.poisson_batch import is_supported, log_expm1, rdp_curves
from fedsim.core.limits import MAX_RENYI_ORDER

# Fine below 2, where the best order lies once epsilon is above 15; long, because it lies above
# 64 once epsilon is below 0.3.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1.0 + k / 20 for k in range(1, 20)),
    *(k / 4 for k in range(8, 44) if k % 4),
    *(float(k) for k in range(2, 65)),
    *(80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0),
)

_MAX_NODES = 1 << 20  # quadrature nodes; reached only where the loss is astronomical
_NEGLIGIBLE = 46.0  # exp(-46) = 1e-20 of the integrand's maximum


def rdp_sampled_gaussian(
    sampling_rate: float,
    noise_multiplier: float,
    orders: Sequence[float] = DEFAULT_ORDERS,
) -> Floats:
    """Return the RDP of one Poisson-sampled Gaussian step, float64 (orders,).

    Guarantee: the step is (orders[i], result[i])-RDP for every i, under zero-out and add-remove
    adjacency. Each example moves the sum by at most 1 in L2 norm before noise of standard deviation
    z is added.

    Precision: 1e-9 relative at every order. For z below about 1e-4, fractional orders use the bound
    without sampling, alpha / (2 z^2), which never under-reports.

    Edge cases: q = 0 gives 0, q = 1 gives the closed form alpha / (2 z^2), z = 0 gives infinity.

    Args:
        sampling_rate: inclusion probability q of each example, in [0, 1].
        noise_multiplier: z >= 0, standard deviation of the noise over the sensitivity.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> from fedsim.accountant.rdp.poisson import rdp_sampled_gaussian
        >>> rdp_sampled_gaussian(0.01, 1.0, (2.0, 8.0)).round(6).tolist()
        [0.000172, 0.000894]
    """
    q = checks.probability("sampling_rate", sampling_rate)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    orders = check_orders(tuple(orders))
    alphas = np.array(orders)
    rates, noises = np.array([q]), np.array([z])
    if is_supported(rates, noises, orders)[0]:
        return rdp_curves(rates, noises, orders)[0]
    if q == 0.0:
        return np.zeros_like(alphas)
    if z < 1e-100:
        return np.full_like(alphas, math.inf)
    # Outside these limits less noise or more sampling is assumed: still a bound, no underflow.
    z, q = min(z, 1e50), max(q, 1e-100)
    unsampled = alphas * (0.5 / z / z)  # sampling never hurts
    if q == 1.0:
        return unsampled
    whole = alphas == np.floor(alphas)
    log_a = np.empty_like(alphas)
    log_a[whole] = _log_moments_whole(alphas[whole], q, z)
    log_a[~whole] = [_log_moment_fractional(a, q, z) for a in alphas[~whole]]
    return np.minimum(unsampled, log_a / (alphas - 1.0))


def rdp_replaced_gaussian(
    sampling_rate: float,
    noise_multiplier: float,
    orders: Sequence[float] = DEFAULT_ORDERS,
) -> Floats:
    """Return the RDP of a Poisson-sampled Gaussian under REPLACE-ONE, float64 (orders,).

    Guarantee: the step is (orders[i], result[i])-RDP for every i, if one example is replaced by
    another. Examples are clipped to norm C, and the noise has standard deviation z C.

    Precision and edge cases are those of `rdp_sampled_gaussian`; q = 1 gives 2 order / z^2.

    Args:
        sampling_rate: inclusion probability q of each example, in [0, 1].
        noise_multiplier: z >= 0, relative to C, not to the sensitivity 2 C.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    q = checks.probability("sampling_rate", sampling_rate)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    alphas = np.array(check_orders(tuple(orders)))
    if q == 0.0:
        return np.zeros_like(alphas)
    if z < 1e-100:
        return np.full_like(alphas, math.inf)
    z, q = min(z, 1e50), max(q, 1e-100)
    unsampled = alphas * (2.0 / z / z)
    if q == 1.0:
        return unsampled
    log_a = np.array([_log_moment_replaced(a, q, z) for a in alphas.tolist()])
    return np.minimum(unsampled, log_a / (alphas - 1.0))


@lru_cache(maxsize=64)
def check_orders(orders: tuple[float, ...]) -> tuple[float, ...]:
    """Check the Rényi orders and return them as a tuple of floats.

    Raises:
        ValueError: `orders` is empty, or an order is not in (1, 65536].
    """
    if not orders:
        raise ValueError("orders must not be empty")
    values = tuple(checks.real_number("orders", order) for order in orders)
    for value in values:
        if not 1.0 < value <= MAX_RENYI_ORDER:
            raise ValueError(f"orders must lie in (1, {MAX_RENYI_ORDER:.0f}], got {value!r}")
    return values


def _log_moments_whole(alphas: Floats, q: float, z: float) -> Floats:
    """Return log A at integer orders, from the binomial expansion of r^alpha.

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
    step = k * math.log(q) + log_expm1(k * (k - 1.0) * (0.5 / z / z))
    rest = alphas[:, None] - k
    inside = rest >= 0
    rest = np.where(inside, rest, 0.0)
    terms = gammaln(alphas + 1.0)[:, None] - gammaln(k + 1.0) - gammaln(rest + 1.0)
    terms += rest * math.log1p(-q) + step
    return np.logaddexp(0.0, logsumexp(np.where(inside, terms, -np.inf), axis=1))


def _log_moment_fractional(alpha: float, q: float, z: float) -> float:
    """Return log A by the trapezoid rule on mu0 (r^alpha - 1 - alpha (r - 1)) >= 0.

    E_mu0[r] = 1, so the integral is A - 1. The rule converges geometrically in the distance of
    the nearest singularity, r = 0, which lies pi z^2 off the real axis.
    """
    corner = 0.5 + z * z * (math.log1p(-q) - math.log(q))  # real part of the singularity
    log_excess = _log_integral(
        lambda x: _log_integrand(x, alpha, q, z), -10.0 * z, alpha + 10.5 * z, z, (corner,)
    )
    if log_excess is None:
        return alpha * (alpha - 1.0) * (0.5 / z / z)
    return float(np.logaddexp(0.0, log_excess))


def _log_moment_replaced(alpha: float, q: float, z: float) -> float:
    """Return log E_Q[(P/Q)^alpha] by the trapezoid rule; the zeros of P and Q are mirror images."""
    corner = 0.5 + z * z * (math.log1p(-q) - math.log(q))
    log_excess = _log_integral(
        lambda x: _log_integrand_replaced(x, alpha, q, z),
        -1.0 - 10.0 * z,
        2.0 * alpha + 10.5 * z,  # at large q the pair is N(1) against N(-1): peak at 2 alpha - 1
        z,
        (corner, -corner),
    )
    if log_excess is None:
        return alpha * (alpha - 1.0) * (2.0 / z / z)
    return float(np.logaddexp(0.0, log_excess))


def _log_integral(
    log_integrand: Callable[[Floats], Floats],
    lowest: float,
    highest: float,
    z: float,
    corners: Sequence[float],
) -> float | None:
    """Return the log of an integral of Gaussians of width z; None if it needs too many nodes.

    Args:
        log_integrand: returns the log of the integrand at each node.
        lowest: the integrand is negligible below it.
        highest: the integrand is negligible above it.
        z: width of the integrand's features.
        corners: real parts of singularities that lie pi z^2 off the real axis.
    """
    if (highest - lowest) / z > _MAX_NODES / 4:
        return None
    scan = np.arange(lowest, highest, z / 2)
    height = log_integrand(scan)
    active = scan[height > height.max() - _NEGLIGIBLE]
    low, high = active[0] - z / 2, active[-1] + z / 2
    near = any(low - z < corner < high + z for corner in corners)
    spacing = min(z / 7, z * z / 2) if near else z / 7
    nodes = math.ceil((high - low) / spacing)
    if nodes > _MAX_NODES:
        return None
    x = low + spacing * np.arange(nodes + 1)
    return float(logsumexp(log_integrand(x))) + math.log(spacing)


def _log_integrand_replaced(x: Floats, alpha: float, q: float, z: float) -> Floats:
    """Return log of Q(x) (r^alpha - 1 - alpha (r - 1)) with r = P/Q."""
    up, down = (x - 0.5) / z / z, (-x - 0.5) / z / z  # log of N(1)/N(0) and of N(-1)/N(0)
    log_p, log_q = (np.logaddexp(math.log1p(-q), math.log(q) + tilt) for tilt in (up, down))
    # r - 1 = q (e^up - e^down) / (Q/mu0), without cancelling where they are alike.
    larger = np.maximum(up, down)
    log_size = math.log(q) + larger - log_q
    shrink = -np.expm1(-np.abs(up - down)) * np.sign(x)
    u = np.exp(np.minimum(log_size, 500.0)) * shrink
    log_r = np.where(np.abs(u) < 0.5, np.log1p(np.clip(u, -0.5, 0.5)), log_p - log_q)
    log_density = -0.5 * (x / z) ** 2 - math.log(z * math.sqrt(2.0 * math.pi)) + log_q
    return log_bernoulli_gap(u, log_r, alpha) + log_density


def _log_integrand(x: Floats, alpha: float, q: float, z: float) -> Floats:
    """Return log of mu0(x) (r^alpha - 1 - alpha (r - 1)), -inf where it is 0."""
    exponent = (x - 0.5) / z / z
    u = q * np.expm1(np.minimum(exponent, 500.0))
    log_r = np.where(exponent < 500.0, np.log1p(u), math.log(q) + exponent)
    log_gap = log_bernoulli_gap(u, log_r, alpha)
    return log_gap - 0.5 * (x / z) ** 2 - math.log(z * math.sqrt(2.0 * math.pi))


def log_bernoulli_gap(
    u: Floats, log_r: Floats, alpha: float, series_scale: float | None = None
) -> Floats:
    """Return log((1+u)^alpha - 1 - alpha u), with log_r = log1p(u), to full relative precision.

    In general the result is log_r + log(expm1(b log_r) + b expm1(-log_r)) with b = alpha - 1, which
    depends on log_r only. Where alpha u is small, these terms cancel, so a Taylor series is used.

    Args:
        u: relative excess of a likelihood ratio, >= -1, or >= 0 if alpha < 0.
        log_r: log1p(u), also where u overflows.
        alpha: the power, outside [0, 1].
        series_scale: the Taylor series is used where `series_scale` |u| is below 0.01; None means
            max(alpha, 2).
    """
    b = alpha - 1.0
    power = b * log_r
    near = np.abs(u) * (series_scale or max(alpha, 2.0)) < 1e-2
    small = np.where(near, u, 0.0)
    series = np.ones_like(u)
    for j in range(9, 2, -1):
        series = 1.0 + (alpha - j + 1.0) / j * small * series
    # expm1(700) is the largest that is finite; from 500 on the other part is below exp(-500).
    general = np.expm1(np.minimum(power, 500.0)) + b * np.expm1(np.minimum(-log_r, 500.0))
    with np.errstate(divide="ignore"):  # u = 0: the gap is 0
        log_series = np.log(0.5 * alpha * b * small * small * series)
        log_general = log_r + np.where(power < 500.0, np.log(np.maximum(general, 0.0)), power)
    log_general = np.where(log_r < -500.0, math.log(abs(b)), log_general)  # u = -1: the gap is b
    return np.where(near, log_series, log_general)

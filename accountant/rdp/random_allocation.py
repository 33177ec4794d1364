"""RDP of one pass of random allocation (balls and bins), under zero-out and add-remove adjacency.

Each example joins one of b batches, uniformly and independently. Every batch releases its clipped
sum with noise of standard deviation z C. The dominating pair of one pass is P, the mean over i of
N(e_i, z^2 I) with unit vectors e_i, against Q = N(0, z^2 I), both in b dimensions (Chua et al.
2024, arXiv:2412.16802; Feldman, Shenfeld 2025, arXiv:2502.08202).

The proof covers steps that look at earlier releases. Let I be the batch of the differing example.
Fix the batches of all other examples (they are independent of I, and divergences are jointly
convex). Given all earlier releases, step t then releases a known vector, plus a vector v_t of norm
at most C if I = t, plus noise. Take coordinate t of the pair, y_t = 1[I = t] + z g_t, and fresh
noise h_t (g_t and h_t are standard normal). Then (|v_t|/C) y_t + (1 - |v_t|^2/C^2)^(1/2) z h_t is
the component of the step's release along v_t, in units of C; the other components are pure noise.
So the pass is a post-processing of the pair, and Rényi divergences, in either order, can only
shrink. Several passes compose as usual.

Let r be the mean of b independent r_i = N(1, z^2)/N(0, z^2), as functions of a sample of Q. Then

    D_alpha(P || Q) = log E[r^alpha] / (alpha - 1),   D_alpha(Q || P) = log E[r^(1 - alpha)] / ...

and the RDP is the larger of both. Both are computed as moments minus 1, which are sums and
integrals of terms >= 0.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.conversion import interpolate_log_moments
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, check_orders

_LARGEST_ORDER = 256.0  # beyond it no amplification is claimed: the sums have order^2 terms
_LEAST_NOISE, _MOST_NOISE = 0.2, 1e4  # outside, none is claimed either
_MOST_BATCHES = 1 << 40
_TILT, _WIDTH = 2.0, 10.0  # in units of z: how far the other order's integrand shifts and reaches
_LOG_STEP = 0.05  # of the integral over log t: its integrand is entire with features of width > 0.3


def rdp_random_allocation(
    batches: int, noise_multiplier: float, orders: Sequence[float] = DEFAULT_ORDERS
) -> Floats:
    """Return an RDP bound of one pass of random allocation, float64 (orders,).

    Guarantee: the pass is (orders[i], result[i])-RDP for every i, under zero-out and add-remove
    adjacency. No value is above order / (2 z^2), the RDP of one Gaussian release without
    amplification by sampling.

    Precision: below order 2 and at whole orders up to 256 the value is the divergence of the
    dominating pair, to 1e-8 relative. Between whole orders it is the convex interpolation. Above
    order 256, and for z < 0.2, it is the bound without amplification.

    Args:
        batches: number of batches of the pass, b >= 1.
        noise_multiplier: noise standard deviation over the clip norm, z >= 0.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    batches = checks.positive_whole_number("batches", batches)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    alphas = np.array(check_orders(tuple(orders)))
    curve = alphas * (0.5 / z / z) if z > 1e-100 else np.full_like(alphas, math.inf)
    if batches > 1 and z >= _LEAST_NOISE:
        # More noise or more batches are lowered to these limits: still a bound, no digits lost.
        z, batches = min(z, _MOST_NOISE), min(batches, _MOST_BATCHES)
        small = alphas <= _LARGEST_ORDER
        if small.any():
            whole = np.arange(2.0, math.ceil(alphas[small].max()) + 1.0)
            removed = _log_moments_removed(whole, batches, z)
            log_a = interpolate_log_moments(whole, removed, alphas[small])
            low = alphas[small] < 2.0
            if low.any():  # the chord from order 1 is up to 35 % too high
                log_a[low] = np.minimum(
                    log_a[low], _log_low_moments(alphas[small][low], batches, z)
                )
            log_a = np.maximum(log_a, _log_moments_added(alphas[small], batches, z))
            curve[small] = np.minimum(curve[small], log_a / (alphas[small] - 1.0))
    return curve


def _log_moments_removed(whole: Floats, batches: int, z: float) -> Floats:
    """Return log E[r^alpha] at the orders 2, 3, ... in `whole`.

    The multinomial expansion gives E[r^alpha] = alpha! times the coefficient of x^alpha in the
    b-th power of the sum over k of c_k (x/b)^k / k!, c_k = E[r_i^k] = e^(k (k-1) / (2 z^2)). With
    c_k = 1 + d_k that sum is e^(x/b) + D(x), and alpha! [x^alpha] (e^(x/b))^b = 1; so what is left
    of the power, F_b = (e^(x/b) + D)^b - e^x, gives E[r^alpha] - 1. It is built by doubling, from
    F_(n+m) = e^(nx/b) F_m + F_n (e^(mx/b) + F_m), whose coefficients are all >= 0.
    """
    k = np.arange(0.0, whole[-1] + 1.0)
    log_factorial = gammaln(k + 1.0)

    def exponential(times: int) -> Floats:
        return k * math.log(times / batches) - log_factorial

    exponent = k * (k - 1.0) * (0.5 / z / z)
    with np.errstate(divide="ignore"):  # d_0 = d_1 = 0
        log_d = exponent + np.log(-np.expm1(-exponent))
    single = log_d + exponential(1)
    total, times = single, 1
    for bit in bin(batches)[3:]:
        total = _product(total, np.logaddexp(math.log(2.0) + exponential(times), total))
        times *= 2
        if bit == "1":
            total = np.logaddexp(
                _product(single, exponential(times)),
                _product(total, np.logaddexp(exponential(1), single)),
            )
            times += 1
    return np.logaddexp(0.0, (total + log_factorial)[2:])


def _product(a: Floats, b: Floats) -> Floats:
    """Return the log coefficients of a product of polynomials, truncated to the factors' length."""
    size = a.size
    index = np.arange(size)[:, None] - np.arange(size)
    terms = np.where(index >= 0, a + b[np.maximum(index, 0)], -np.inf)
    top = terms.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.exp(terms - shift[:, None]).sum(axis=1))


def _log_moments_added(alphas: Floats, batches: int, z: float) -> Floats:
    """Return log E[r^(1 - alpha)], or a bound on it, at any orders > 1.

    With beta = alpha - 1, as the arithmetic mean r is at least the geometric mean, a bound is
    E[product of r_i^(-beta/b)] = exp(beta (beta/b + 1) / (2 z^2)). It serves where beta is so large
    that the other order of the pair decides; elsewhere the moment is computed.
    """
    beta = alphas - 1.0
    result = beta * (beta / batches + 1.0) * (0.5 / z / z)
    computed = beta <= _TILT * z * batches
    if computed.any():
        result[computed] = np.minimum(
            result[computed], _log_inverse_moments(beta[computed], batches, z)
        )
    return result


def _log_inverse_moments(beta: Floats, batches: int, z: float) -> Floats:
    """Return log E[r^-beta] for 0 < beta <= `_TILT` z b.

    By Euler's integral for r^-beta, and as E[r] = 1,
    E[r^-beta] - 1 = 1/Gamma(beta) times the integral of t^(beta-1) (E[e^(-t r)] - e^-t) dt.
    Most of the integral lies where the r_i are as small as at x = -beta/b, and t is up to 1/r.
    """
    low = -60.0 / (float(beta.min()) + 2.0)  # the difference falls like t^2
    tau = np.arange(low, _log_largest_t(float(beta.max()), z), _LOG_STEP)
    column = beta[:, None]
    log_terms = column * tau + _log_laplace_excess(tau, batches, z)
    log_terms += math.log(_LOG_STEP) - gammaln(column)
    return np.logaddexp(0.0, logsumexp(log_terms, axis=1))


def _log_low_moments(alphas: Floats, batches: int, z: float) -> Floats:
    """Return log E[r^alpha] for 1 < alpha < 2.

    As the integral of t^(-alpha-1) (e^(-t r) - 1 + t r) dt is Gamma(-alpha) r^alpha, and E[r] = 1,
    E[r^alpha] - 1 = 1/Gamma(-alpha) times the integral of t^(-alpha-1) (E[e^(-t r)] - e^-t) dt.
    Under tilting by r^alpha the r_i reach e^((1.5 + 10 z) / z^2). Where t is far below 1/r the
    difference is a multiple of t^2, and the rest of the sum over log t is a geometric series.
    """
    low = math.log(batches) - (1.5 + _WIDTH * z) / z / z + math.log(1e-10)
    tau = np.arange(min(low, math.log(1e-10)), _log_largest_t(0.0, z), _LOG_STEP)
    column = alphas[:, None]
    log_terms = _log_laplace_excess(tau, batches, z) - column * tau
    log_terms[:, 0] -= np.log(-np.expm1(-_LOG_STEP * (2.0 - alphas)))
    log_gamma = gammaln(2.0 - alphas) - np.log(alphas * (alphas - 1.0))
    log_excess = logsumexp(log_terms, axis=1) + math.log(_LOG_STEP) - log_gamma
    return np.logaddexp(0.0, log_excess)


def _log_largest_t(beta: float, z: float) -> float:
    """Return the log t above which e^(-t r) t^beta is negligible."""
    return math.log(beta + 60.0) + (_TILT + _WIDTH) / z + 0.5 / z / z


def _log_laplace_excess(tau: Floats, batches: int, z: float) -> Floats:
    """Return log(E[e^(-t r)] - e^-t) at t = e^tau.

    E[e^(-t r)] = phi(t/b)^b with phi(s) = E[e^(-s r_1)]. Where it is close to e^-t the difference
    is e^-t ((1 + psi)^b - 1), psi = E[e^(-s (r_1 - 1)) - 1 + s (r_1 - 1)] >= 0.
    """
    t = np.exp(tau)
    s = (t / batches)[:, None]
    spacing = min(z / 7.0, z * z / 4.0)
    x = np.arange(-(_TILT + _WIDTH) * z, 2.0 + _WIDTH * z, spacing)
    loss = (x - 0.5) / z / z
    log_weight = -0.5 * (x / z) ** 2 + math.log(spacing / z / math.sqrt(2.0 * math.pi))
    log_psi = logsumexp(_log_second_order(s * np.expm1(loss)) + log_weight, axis=1)
    log_power = batches * np.logaddexp(0.0, log_psi)
    log_near = np.log(np.expm1(np.minimum(log_power, 1.0))) - t
    log_phi = batches * logsumexp(log_weight - s * np.exp(loss), axis=1)
    log_far = log_phi + np.log(-np.expm1(-np.maximum(t + log_phi, 0.5)))
    return np.where(log_power < 1.0, log_near, log_far)


def _log_second_order(y: Floats) -> Floats:
    """Return log(e^-y - 1 + y), to full relative precision."""
    near = np.abs(y) < 0.02
    small = np.where(near, y, 0.0)
    series = np.ones_like(y)
    for j in range(9, 2, -1):
        series = 1.0 - small / j * series
    general = np.expm1(np.minimum(-y, 500.0)) + y
    with np.errstate(divide="ignore"):
        log_series = np.log(0.5 * small * small * series)
        log_general = np.where(y > -500.0, np.log(np.maximum(general, 0.0)), -y)
    return np.where(near, log_series, log_general)

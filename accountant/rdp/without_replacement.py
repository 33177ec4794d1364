"""RDP of the Gaussian mechanism on a sample without replacement, under REPLACE-ONE adjacency.

HALF THE NOISE. Everywhere in this package z is the noise over C, the clipping norm of one example.
Here one example replaces another, which moves the sum by 2C. So every formula below uses
z_r = z / 2: callers pass z and this module halves it. (dp-accounting's event for this sampling
takes z_r instead; passing z to it is a common and large error.)

Of n examples m are drawn without replacement, q = m/n. Zero-out and add-remove adjacency are NOT
covered: if an example is missing, another one is drawn instead. The curve lies below those that are
published (experiments/accounting/published_curves.py).

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

import numpy as np
from scipy.special import logsumexp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.poisson import check_orders, log_bernoulli_gap

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_NEGLIGIBLE = 46.0  # exp(-46) = 1e-20 of the integrand's maximum
_MAX_PANELS = 1 << 14
_LEAST_NOISE = 1e-3  # below this z_r the bounds are those of the unsampled Gaussian


def rdp_without_replacement(
    sampling_rate: float, noise_multiplier: float, orders: Sequence[float]
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
    q = checks.probability("sampling_rate", sampling_rate)
    z = checks.non_negative("noise_multiplier", noise_multiplier)
    alphas = np.array(check_orders(tuple(orders)))
    if q == 0.0:
        return np.zeros_like(alphas)
    # Outside these limits less noise or more sampling is assumed: still a bound, no underflow.
    z_r, q = min(0.5 * z, 1e50), max(q, 1e-100)
    gaussian = alphas * (0.5 / z_r / z_r) if z_r > 1e-100 else np.full_like(alphas, math.inf)
    if q == 1.0 or z_r < _LEAST_NOISE:
        return gaussian
    moments = np.array([_log_dominating_moment(order, q, z_r) for order in alphas.tolist()])
    return np.minimum(gaussian, moments / (alphas - 1.0))


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
    return float(np.logaddexp(0.0, logsumexp(log_values)))


def _log_integrand(x: Floats, order: float, q: float, z_r: float) -> Floats:
    exponent = (x - 0.5) / z_r / z_r  # >= 0
    u = q * np.expm1(np.minimum(exponent, 500.0))
    log_r = np.where(exponent < 500.0, np.log1p(u), math.log(q) + exponent)
    gaps = (log_bernoulli_gap(u, log_r, a, max(abs(a) + 1.0, 2.0)) for a in (order, 1.0 - order))
    both = np.logaddexp(*gaps)
    return both - 0.5 * (x / z_r) ** 2 - math.log(z_r * math.sqrt(2.0 * math.pi))

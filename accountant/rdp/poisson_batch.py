"""RDP curves of many Poisson-sampled Gaussians at once, computed as arrays.

A step has sampling rate q and noise multiplier z. For x from mu0 = N(0, z^2) let the likelihood
ratio be r = 1 + u = 1 - q + q e^t with t = (x - 1/2) / z^2. The RDP of order b follows from
A(b) = E_mu0[r^b]. At integer orders A is a binomial sum without cancellation. At other orders A - 1
is an integral of mu0 (r^b - 1 - b u) >= 0, computed by the trapezoid rule. All exponents of a
mechanism share the nodes, so r is computed once per node. Both computations use arrays (mechanisms
x orders x terms).

Precision: 1e-12 relative in log A; the tests compare with mpmath. The trapezoid rule with spacing h
has an error of exp(-2 pi a / h) for an integrand that is analytic within a of the real axis. Here r
vanishes at a distance of pi z^2 from the axis, which limits a. The Gaussian factor mu0 grows away
from the axis, so an a above about 2 pi z^2 / h does not help. The spacing h follows from both.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from fedsim.accountant.checks import Floats

_TAIL = 9.0  # standard deviations kept; the integrand is below 3e-18 of its peak beyond
_LARGEST_EXPONENT = 680.0  # e^680 times anything that occurs here is finite
_ELEMENTS = 1 << 16  # of a work array: it stays in the cache of one core
_NEAR = 0.3  # |exponent * log r| up to which the moment series is used ...
_TERMS = 14  # ... with this many terms: the first one left out is 1e-16 of the sum


def is_supported(rates: Floats, noises: Floats, orders: Sequence[float]) -> NDArray[np.bool_]:
    """Whether `rdp_curves` is valid for each mechanism, bool (mechanisms,).

    `rdp_curves` is valid for sampling rates 1e-100 <= q < 1 if no product in it overflows a float.
    At the default orders no product does so for noise multipliers z between 0.5 and 1e6.

    Args:
        rates: sampling rates q, float64 (mechanisms,).
        noises: noise multipliers z, float64 (mechanisms,).
        orders: Rényi orders > 1.
    """
    fractional = [order for order in orders if order != math.floor(order)]
    reach = max(fractional, default=2.0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        far = np.maximum(2.0, reach) + _TAIL * noises
        steepest = reach * (far - 0.5) / noises**2
        lightest = 0.5 * (far / noises) ** 2
    fits = (steepest < _LARGEST_EXPONENT) & (lightest < _LARGEST_EXPONENT)
    return (rates >= 1e-100) & (rates < 1.0) & (noises <= 1e6) & fits


def rdp_curves(rates: Floats, noises: Floats, orders: Sequence[float]) -> Floats:
    """Return the RDP of each Poisson-sampled Gaussian at each order, float64 (mechanisms, orders).

    Guarantee: step i is (orders[j], result[i, j])-RDP for every j. The values agree with those of
    `rdp_sampled_gaussian` to 1e-12 relative.

    Args:
        rates: sampling rates q, float64 (mechanisms,).
        noises: noise multipliers z, float64 (mechanisms,); `is_supported` must hold for each.
        orders: Rényi orders > 1.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    whole = alphas == np.floor(alphas)
    log_a = np.empty((rates.size, alphas.size))
    if whole.any():
        log_a[:, whole] = _log_moments_whole(rates, noises, tuple(alphas[whole]))
    if not whole.all():
        log_a[:, ~whole] = log_moment_table(rates, noises, alphas[~whole])
    unsampled = alphas * (0.5 / noises / noises)[:, None]  # sampling never hurts
    return np.minimum(unsampled, log_a / (alphas - 1.0))


def log_moment_table(rates: Floats, noises: Floats, exponents: Floats) -> Floats:
    """Return log E_mu0[r^b] for each exponent b, by quadrature, float64 (mechanisms, exponents).

    A mechanism has sampling rate q and noise multiplier z. The mean is over x from mu0 = N(0, z^2),
    and r = 1 - q + q e^((x - 1/2) / z^2) is the likelihood ratio mu/mu0 of the pair in `loss_pmf`.
    With b = alpha > 1 the value is (alpha - 1) times the RDP of "remove". With b = -s < 0 it is the
    log moment generating function at s of the "add" loss, as E_mu[(mu0/mu)^(s+1)] = E_mu0[r^-s].

    Args:
        rates: sampling rates q in (0, 1), float64 (mechanisms,).
        noises: noise multipliers z, float64 (mechanisms,); for b > 0 `is_supported` must hold.
        exponents: exponents b below 0 or above 1; for a negative b, b log(1 - q) must be below 600.
    """
    least, most = float(exponents.min()), float(exponents.max())
    low, high = min(0.0, least) - _TAIL * noises, max(2.0, most) + _TAIL * noises
    # A negative power of r does not vanish at r = 0 but has a pole: keep twice as far from it.
    widest = np.minimum(0.4 * noises, (0.5 if least > 0.0 else 0.25) * noises**2)
    counts = np.ceil((high - low) / widest).astype(int) + 1
    result = np.empty((rates.size, exponents.size))
    ranked = np.argsort(counts)[::-1]
    start = 0
    while start < ranked.size:  # mechanisms of similar size share one number of nodes
        nodes = int(counts[ranked[start]])
        chosen = ranked[start : start + max(1, _ELEMENTS // (nodes * exponents.size))]
        spacing = (high[chosen] - low[chosen]) / (nodes - 1)
        x = low[chosen, None] + spacing[:, None] * np.arange(nodes)
        result[chosen] = np.log1p(
            _excess(x, spacing, rates[chosen, None], noises[chosen, None], exponents)
        )
        start += chosen.size
    return result


def _excess(x: Floats, spacing: Floats, q: Floats, z: Floats, exponents: Floats) -> Floats:
    """Return A - 1, the integral of mu0 (r^b - 1 - b u), by the trapezoid rule at `x`.

    Where log r is not small the integrand is r (expm1((b-1) log r) - (b-1) u / r). Where it is
    small that cancels, and the integrand is the Taylor series of expm1(b log r) - b log r, less
    b (u - log r): a polynomial in b, so the sum over nodes needs the moments of log r only.
    """
    weight = np.exp(-0.5 * (x / z) ** 2) * (spacing[:, None] / (z * math.sqrt(2.0 * math.pi)))
    u = q * np.expm1((x - 0.5) / z / z)
    log_r = np.log1p(u)
    near = np.abs(log_r) * np.abs(exponents).max() < _NEAR
    result = _near_excess(np.where(near, weight, 0.0), np.where(near, u, 0.0), exponents)
    powers = exponents - 1.0
    with np.errstate(under="ignore"):
        grown = np.expm1(log_r[:, None, :] * powers[:, None])
        far = np.where(near, 0.0, weight * (1.0 + u))
        result += np.matmul(grown, far[:, :, None])[:, :, 0]
    result -= np.where(near, 0.0, weight * u).sum(axis=1)[:, None] * powers
    return result


def _near_excess(weight: Floats, u: Floats, exponents: Floats) -> Floats:
    log_r = np.log1p(u)
    moments = np.empty((u.shape[0], _TERMS))
    power = weight * log_r
    for j in range(_TERMS):
        power = power * log_r
        moments[:, j] = power.sum(axis=1)
    degree = np.arange(2, _TERMS + 2)
    basis = np.exp(-gammaln(degree + 1.0))[:, None] * exponents ** degree[:, None]
    left = (weight * _log_gap(u)).sum(axis=1)
    return moments @ basis - left[:, None] * exponents


def _log_gap(u: Floats) -> Floats:
    """Return u - log(1 + u) for |u| < 0.4, to full relative precision.

    With w = u / (2 + u), log(1 + u) = 2 atanh(w), and u - 2 w = u w.
    """
    w = u / (2.0 + u)
    square = w * w
    series = np.zeros_like(u)
    for k in range(23, 1, -2):
        series = (series + 1.0 / k) * square
    return u * w - 2.0 * w * series


class _Binomials(NamedTuple):
    """The terms of the binomial sums at several integer orders, concatenated order by order."""

    k: NDArray[np.intp]
    rest: Floats
    log_choose: Floats
    starts: NDArray[np.intp]
    lengths: NDArray[np.intp]


@lru_cache(maxsize=8)
def _binomials(orders: tuple[float, ...]) -> _Binomials:
    alphas = [int(order) for order in orders]
    k = np.concatenate([np.arange(2, alpha + 1) for alpha in alphas])
    lengths = np.array([alpha - 1 for alpha in alphas])
    repeated = np.repeat(np.array(alphas, dtype=np.float64), lengths)
    rest = repeated - k
    log_choose = gammaln(repeated + 1.0) - gammaln(k + 1.0) - gammaln(rest + 1.0)
    return _Binomials(k, rest, log_choose, np.cumsum(lengths) - lengths, lengths)


def _log_moments_whole(rates: Floats, noises: Floats, orders: tuple[float, ...]) -> Floats:
    """Return log A at integer orders by the binomial sum, float64 (mechanisms, orders)."""
    table = _binomials(orders)
    result = np.empty((rates.size, len(orders)))
    width = max(1, _ELEMENTS // table.k.size)
    for start in range(0, rates.size, width):
        part = slice(start, start + width)
        q, z = rates[part, None], noises[part, None]
        k = np.arange(table.k.max() + 1.0)
        k[:2] = 2.0  # any finite value: these two are not used
        step = k * np.log(q) + log_expm1(k * (k - 1.0) * (0.5 / z / z))
        terms = np.take(step, table.k, axis=1)
        terms += table.log_choose + table.rest * np.log1p(-q)
        top = np.maximum.reduceat(terms, table.starts, axis=1)
        terms -= np.repeat(top, table.lengths, axis=1)
        with np.errstate(under="ignore"):
            sums = np.add.reduceat(np.exp(terms), table.starts, axis=1)
        result[part] = np.logaddexp(0.0, top + np.log(sums))
    return result


def log_expm1(x: Floats) -> Floats:
    """Return log(e^x - 1) for x >= 0, without overflow."""
    small, large = np.minimum(x, 1.0), np.maximum(x, 1.0)
    return np.where(x < 1.0, np.log(np.expm1(small)), large + np.log1p(-np.exp(-large)))

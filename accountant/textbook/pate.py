"""Privacy of PATE (noisy voting by teachers), an example of data-dependent accounting.

Teachers trained on disjoint data vote on each query. GNMax adds N(0, sigma^2) to each vote count
and releases the argmax. Changing one training example changes one teacher, so one vote on each
query. Two counts move by 1, an L2 sensitivity of sqrt(2). If the vote is nearly unanimous, the
release reveals almost nothing, and a bound that uses the votes is far below the worst case.

Such a bound is itself PRIVATE: publish it only through `smooth_release`. The bound is on the Rényi
divergence between the outcome for the actual votes and the outcome for votes that differ in one
teacher, as in the paper.

Reference: Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson 2018, arXiv:1802.08908.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, logsumexp, ndtri_exp

from fedsim.accountant import checks
from fedsim.accountant.checks import Floats
from fedsim.accountant.rdp.poisson import DEFAULT_ORDERS, check_orders

_CELLS = 64  # grid cells per 1/sigma, when local sensitivities are bounded over a range of votes


class SmoothRelease(NamedTuple):
    """A data-dependent RDP cost, and the noise and RDP of publishing it.

    Attributes:
        order: the Rényi order.
        cost: the data-dependent RDP of all queries. PRIVATE.
        smooth_sensitivity: a smooth upper bound SS of the cost's local sensitivity. PRIVATE.
        noise_std: standard deviation of the noise on a published cost: SS times the noise
            multiplier. PRIVATE.
        release_rdp: RDP of publishing the noisy cost, at the same order. Public.
    """

    order: float
    cost: float
    smooth_sensitivity: float
    noise_std: float
    release_rdp: float

    def publish(self, rng: np.random.Generator) -> float:
        """Return the cost plus fresh noise, which may be published once and costs `release_rdp`."""
        return self.cost + self.noise_std * float(rng.standard_normal())


def gnmax_rdp(sigma: float, orders: Sequence[float] = DEFAULT_ORDERS) -> Floats:
    """Return the data-independent RDP order / sigma^2 of one GNMax query.

    Source: Papernot et al. 2018, Proposition 8.

    Args:
        sigma: standard deviation of the noise on each vote count, > 0.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    sigma = checks.positive("sigma", sigma)
    return np.array(check_orders(tuple(orders))) / sigma**2


def gnmax_log_q(votes: ArrayLike, sigma: float) -> Floats:
    """Return the log of an upper bound q on P[outcome is not the plurality], float64 (queries,).

    The plurality is the class i* with most votes. With n_i votes for class i, q = sum over i != i*
    of erfc((n_i* - n_i) / (2 sigma)) / 2, at most 1 (Papernot et al. 2018, Proposition 7).

    Args:
        votes: vote counts >= 0, shape (queries, classes) or (classes,), at least two classes.
        sigma: standard deviation of the noise on each count, > 0.

    Raises:
        ValueError: an argument is outside its range.
    """
    counts, sigma = _checked_votes(votes), checks.positive("sigma", sigma)
    ordered = -np.sort(-counts, axis=1)
    gaps = ordered[:, :1] - ordered[:, 1:]
    # erfc(x / 2) / 2 = Phi(-x / sqrt(2)), in log space also where it underflows
    log_q = logsumexp(log_ndtr(-gaps / (math.sqrt(2.0) * sigma)), axis=1)
    return np.minimum(0.0, np.asarray(log_q))


def data_dependent_rdp(
    log_q: ArrayLike, sigma: float, orders: Sequence[float] = DEFAULT_ORDERS
) -> Floats:
    """Return the data-dependent RDP of GNMax queries, float64 (queries, orders).

    The formulas are Theorem 6 and Proposition 10 of Papernot et al. 2018. Let q bound the
    probability that the outcome is not the plurality. For order a let mu2 = sigma sqrt(log(1/q)),
    mu1 = mu2 + 1, eps1 = mu1 / sigma^2, eps2 = mu2 / sigma^2,
    A = (1-q) / (1 - (q exp(eps2))^(1 - 1/mu2)) and B = exp(eps1) / q^(1/(mu1-1)). The value is
    log((1-q) A^(a-1) + q B^(a-1)) / (a-1) if a <= mu1, mu2 > 1 and
    q <= exp((mu2-1) eps2) / (mu1/(mu1-1) * mu2/(mu2-1))^mu2. Otherwise, or if that is smaller, it
    is the data-independent a / sigma^2.

    Guarantee: take votes whose non-plurality outcomes have probability at most q, and any votes
    that differ in one teacher. The Rényi divergence of the outcomes is at most the value.

    Args:
        log_q: log of the bound q, <= 0, shape (queries,) or a number; `gnmax_log_q` computes it.
            Minus infinity means that the outcome is certain and the RDP is 0.
        sigma: standard deviation of the noise on each count, > 0.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    values = np.atleast_1d(np.asarray(log_q, dtype=float))
    if values.ndim != 1 or not np.all(values <= 0.0):
        raise ValueError(f"log_q must be a list of numbers <= 0, got {log_q!r}")
    sigma = checks.positive("sigma", sigma)
    alphas = np.array(check_orders(tuple(orders)))
    bound = np.broadcast_to(alphas / sigma**2, (values.size, alphas.size)).copy()
    bound[np.isneginf(values)] = 0.0
    mu2 = sigma * np.sqrt(-values)
    rows = np.flatnonzero((mu2 > 1.0) & np.isfinite(values))
    rows = rows[_condition_holds(values[rows], mu2[rows], sigma)]
    if rows.size:
        sharp = _theorem_6(values[rows, None], mu2[rows, None], sigma, alphas)
        sharp = np.where(alphas <= mu2[rows, None] + 1.0, sharp, math.inf)
        bound[rows] = np.clip(sharp, 0.0, bound[rows])
    return bound


def _condition_holds(log_q: Floats, mu2: Floats, sigma: float) -> NDArray[np.bool_]:
    """Whether q is small enough for Theorem 6, given mu2 > 1; mu1 = mu2 + 1."""
    eps2 = mu2 / sigma**2
    limit = (mu2 - 1.0) * eps2 - mu2 * (np.log1p(1.0 / mu2) + np.log1p(1.0 / (mu2 - 1.0)))
    return (log_q <= limit) & (log_q + eps2 < 0.0)


def _theorem_6(log_q: Floats, mu2: Floats, sigma: float, alphas: Floats) -> Floats:
    eps1, eps2 = (mu2 + 1.0) / sigma**2, mu2 / sigma**2
    log_1q = np.log1p(-np.exp(log_q))
    log_a = log_1q - np.log1p(-np.exp((log_q + eps2) * (1.0 - 1.0 / mu2)))
    log_b = eps1 - log_q / mu2
    b = alphas - 1.0
    return np.logaddexp(log_1q + b * log_a, log_q + b * log_b) / b


def gnmax_sequence_rdp(
    votes: ArrayLike, sigma: float, orders: Sequence[float] = DEFAULT_ORDERS
) -> Floats:
    """Return the data-dependent RDP of answering all queries by GNMax, float64 (orders,).

    Args:
        votes: vote counts, shape (queries, classes).
        sigma: standard deviation of the noise on each count, > 0.
        orders: Rényi orders, each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    return data_dependent_rdp(gnmax_log_q(votes, sigma), sigma, orders).sum(axis=0)


# --- Publishing the cost (Appendix B) -----------------------------------------------------------


def gnmax_local_sensitivities(votes: ArrayLike, sigma: float, order: float) -> Floats:
    """Return bounds on how much one teacher changes the cost, the data-dependent RDP.

    There is one bound for each number d = 0, 1, ... of teachers that already differ, shape
    (teachers + 1,). The bounds are sums over queries and never decrease in d.

    With m classes write the q of `data_dependent_rdp` as (m-1) Phi(-x), with
    Phi(-x) = erfc(x/sqrt(2)) / 2: x is the gap between the winner's count and m - 1 equal counts of
    losers, in standard deviations of the noisy gap. One changed vote moves every gap of counts by
    at most 2, which is s = sqrt(2) / sigma in x. Because Phi(Phi^-1(p) + s) is concave in
    p, it moves the x of any vote by at most s; this is B_U and B_L of Papernot et al. 2018. Let
    f(x) be the cost, which never increases in x. One change of a vote changes the cost by at most
    g(y) = f(y) - f(y + s) for some y in [x - s, x]. If d teachers already differ, x differs from
    its actual value by at most d s. The maximum of g over all such y is bounded piece by piece from
    f's monotonicity alone. The paper's Algorithms 3 to 5 follow the votes themselves and are
    somewhat tighter. They need a condition (their C6) that is not needed here.

    Args:
        votes: vote counts, shape (queries, classes), of equally many teachers in every query.
        sigma: standard deviation of the noise on each count, > 0.
        order: the Rényi order, in (1, 65536].

    Raises:
        ValueError: an argument is outside its range, or the cost is not monotone in q for this
            sigma and order (the paper's condition C5).
    """
    counts = _checked_votes(votes)
    teachers = _teachers(counts)
    log_q, sigma = gnmax_log_q(counts, sigma), checks.positive("sigma", sigma)
    (order,) = check_orders((order,))
    losers = counts.shape[1] - 1
    step = math.sqrt(2.0) / sigma
    cell = step / _CELLS
    # The floor only makes votes less unanimous where the cost is 0 anyway.
    x = -ndtri_exp(np.maximum(log_q - math.log(losers), -1e6))
    lowest = float(x.min()) - (teachers + 2) * step
    highest = float(x.max()) + (teachers + 3) * step
    grid = lowest + cell * np.arange(math.ceil((highest - lowest) / cell) + 2.0)
    cost = _cost_table(grid, losers, sigma, order)
    change = cost[: -_CELLS - 1] - cost[_CELLS + 1 :]  # >= g anywhere in the cell
    return _window_maxima(change, (x - lowest) / cell, teachers)


def _cost_table(grid: Floats, losers: int, sigma: float, order: float) -> Floats:
    """Return the cost f at each gap x; raise if it increases with x."""
    log_q = np.minimum(0.0, math.log(losers) + log_ndtr(-grid))
    cost = data_dependent_rdp(log_q, sigma, (order,))[:, 0]
    if np.any(np.diff(cost) > 1e-15 + 1e-9 * cost[:-1]):
        raise ValueError(
            f"sigma = {sigma!r} and order = {order!r} must give a cost that grows with q "
            "(Papernot et al. 2018, condition C5) for smooth sensitivity; choose another order"
        )
    return np.minimum.accumulate(cost)


def _window_maxima(change: Floats, positions: Floats, teachers: int) -> Floats:
    """Return for each d the sum over queries of the largest change that d teachers can reach."""
    total = np.zeros(teachers + 1)
    for position in positions.tolist():
        left, right = math.floor(position), math.ceil(position)
        before = np.maximum.accumulate(change[: left + 1][::-1])
        after = np.maximum.accumulate(change[right:])
        distances = np.arange(teachers + 1)
        reach_left = np.minimum((distances + 1) * _CELLS + 1, before.size - 1)
        reach_right = np.minimum(distances * _CELLS + 1, after.size - 1)
        total += np.maximum(before[reach_left], after[reach_right])
    return total


def smooth_sensitivity(local_sensitivities: Floats, beta: float) -> float:
    """Return the smooth sensitivity max over d of exp(-beta d) LS_d (Nissim et al. 2007).

    Args:
        local_sensitivities: LS_d >= 0 at distance d = 0, 1, ..., up to the farthest data set.
        beta: the smoothness parameter, > 0.

    Raises:
        ValueError: an argument is outside its range.
    """
    beta = checks.positive("beta", beta)
    values = np.asarray(local_sensitivities, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.all(values >= 0.0):
        raise ValueError(f"local_sensitivities must be a list of numbers >= 0, got {values!r}")
    return float(np.max(values * np.exp(-beta * np.arange(values.size))))


def gnss_rdp(noise_multiplier: float, beta: float, order: float) -> float:
    """Return the RDP of a value f + SS N(0, noise_multiplier^2), SS a beta-smooth sensitivity of f.

    The value is exact for the worst neighbours that smoothness allows: N(0, 1) against N(k / sigma,
    k^2) with k = e^-beta, in units of the first standard deviation. (A smaller and a larger ratio
    of the deviations both give less.) With s = order - (order - 1) e^(2 beta) the RDP is
    order / (2 sigma^2 s) - beta - log(s) / (2 (order - 1)); it is infinite if s <= 0.

    The published code of Papernot et al. 2018 (named Theorem 23 there) has order e^(2 beta) /
    sigma^2 + (beta order - log(1 - 2 order beta)/2) / (order - 1). This formula lacks 1/s on the
    first term, so it UNDER-REPORTS where order is near 1/(2 beta). At order 20, sigma 10 and
    beta = 0.49 / order, used with that code, it gives 0.34, not 2.24.

    Args:
        noise_multiplier: sigma > 0, noise standard deviation over the smooth sensitivity SS.
        beta: the smoothness parameter, > 0.
        order: the Rényi order, in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    sigma, beta = (
        checks.positive("noise_multiplier", noise_multiplier),
        checks.positive("beta", beta),
    )
    (order,) = check_orders((order,))
    s = 1.0 - (order - 1.0) * math.expm1(min(2.0 * beta, 700.0))
    if s <= 0.0:
        return math.inf
    return order / (2.0 * sigma * sigma * s) - beta - math.log(s) / (2.0 * (order - 1.0))


def smooth_release(
    votes: ArrayLike,
    sigma: float,
    order: float,
    noise_multiplier: float,
    beta: float | None = None,
) -> SmoothRelease:
    """Return the data-dependent RDP of all queries at one order, and the noise for publishing it.

    Guarantee: the answers and the result of one call of `publish` together are
    (order, cost + release_rdp)-RDP between the actual votes and any votes that differ in one
    teacher. Order, noise multiplier and beta must not depend on the votes.

    Args:
        votes: vote counts, shape (queries, classes), of equally many teachers in every query.
        sigma: standard deviation of the queries' noise on each count, > 0.
        order: the Rényi order, in (1, 65536].
        noise_multiplier: noise on the published cost over its smooth sensitivity, > 0.
        beta: the smoothness parameter, > 0; None uses 0.2 / order.

    Raises:
        ValueError: an argument is outside its range; see also `gnmax_local_sensitivities`.
    """
    noise = checks.positive("noise_multiplier", noise_multiplier)
    local = gnmax_local_sensitivities(votes, sigma, order)
    beta = 0.2 / order if beta is None else beta
    smooth = smooth_sensitivity(local, beta)
    cost = float(gnmax_sequence_rdp(votes, sigma, (order,))[0])
    return SmoothRelease(order, cost, smooth, noise * smooth, gnss_rdp(noise, beta, order))


def _checked_votes(votes: ArrayLike) -> Floats:
    counts = np.atleast_2d(np.asarray(votes, dtype=float))
    if counts.ndim != 2 or counts.shape[1] < 2:
        raise ValueError(
            f"votes must have the shape (queries, classes >= 2), got {np.shape(votes)}"
        )
    if not np.all((counts >= 0.0) & (counts < math.inf)):
        bad = counts[~((counts >= 0.0) & (counts < math.inf))][0]
        raise ValueError(f"votes must be finite counts >= 0, got {float(bad)!r}")
    return counts


def _teachers(counts: Floats) -> int:
    totals = counts.sum(axis=1)
    if totals.size == 0 or np.any(totals != totals[0]):
        raise ValueError(
            "votes must add up to the same number of teachers in every query, "
            f"got {sorted(set(totals.tolist()))[:10]}"
        )
    return checks.whole_number("votes", float(totals[0]))

"""PATE: privacy of noisy voting, an example of data-dependent privacy accounting.

Teachers trained on disjoint data vote on each query; GNMax releases the argmax of the vote counts
plus N(0, sigma^2). Changing one training example changes one teacher, hence one vote on each query:
two counts move by 1, an L2 sensitivity of sqrt(2). Where the vote is nearly unanimous the release
reveals almost nothing, and a bound that looks at the votes is far below the worst case.

Such a bound is itself PRIVATE: publish it only through `smooth_release`. It bounds the divergence
of the outcome on the actual votes from the outcome on neighbouring ones, as in the paper.

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
    """A data-dependent RDP cost with what it takes to publish it.

    Attributes:
        order: the Rényi order.
        cost: the data-dependent RDP of all queries. PRIVATE.
        smooth_sensitivity: SS, a smooth upper bound of the cost's local sensitivity. PRIVATE.
        noise_std: standard deviation of the noise on a published cost, SS times the multiplier.
            PRIVATE.
        release_rdp: RDP of publishing the noisy cost, at the same order. Public.
    """

    order: float
    cost: float
    smooth_sensitivity: float
    noise_std: float
    release_rdp: float

    def publish(self, rng: np.random.Generator) -> float:
        """Return cost + noise, which may be published once, at `release_rdp` more."""
        return self.cost + self.noise_std * float(rng.standard_normal())


def gnmax_rdp(sigma: float, orders: Sequence[float] = DEFAULT_ORDERS) -> Floats:
    """Return the data-independent RDP of one GNMax query, order / sigma^2 (Proposition 8).

    Args:
        sigma: > 0, standard deviation of the noise on each count.
        orders: each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    sigma = checks.positive("sigma", sigma)
    return np.array(check_orders(tuple(orders))) / sigma**2


def threshold_rdp(sigma: float, orders: Sequence[float] = DEFAULT_ORDERS) -> Floats:
    """Return the data-independent RDP of one noisy threshold check, order / (2 sigma^2).

    The largest count moves by at most 1.

    Args:
        sigma: > 0, standard deviation of the noise on the largest count.
        orders: each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    return 0.5 * gnmax_rdp(sigma, orders)


def gnmax_log_q(votes: ArrayLike, sigma: float) -> Floats:
    """Return log of an upper bound on P[outcome is not the plurality] for each query.

    q = sum over i != i* of erfc((n_i* - n_i) / (2 sigma)) / 2 (Proposition 7), at most 1.

    Args:
        votes: counts of shape (queries, classes) or (classes,), at least two classes, >= 0.
        sigma: > 0.

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
    """Return the data-dependent RDP of GNMax queries, shape (queries, orders): Theorem 6.

    With mu2 = sigma sqrt(log(1/q)), mu1 = mu2 + 1 (Proposition 10) and e_i = mu_i / sigma^2 it is
    log((1-q) A^(a-1) + q B^(a-1)) / (a-1), A = (1-q) / (1 - (q e^e2)^(1 - 1/mu2)),
    B = e^e1 / q^(1/(mu1-1)), where a <= mu1, mu2 > 1 and
    q <= e^((mu2-1) e2) / (mu1/(mu1-1) * mu2/(mu2-1))^mu2; elsewhere, or where it is smaller,
    the data-independent a / sigma^2.

    Guarantee: for votes whose non-plurality outcomes have probability at most q, and any votes that
    differ in one teacher, the Rényi divergence of the outcomes is at most the value.

    Args:
        log_q: log of q, <= 0 (minus infinity: the outcome is certain, 0), of shape (queries,) or
            a number.
        sigma: > 0.
        orders: each in (1, 65536].

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
    """Return the data-dependent RDP of answering all queries by GNMax, one value per order.

    Args:
        votes: counts, shape (queries, classes).
        sigma: > 0.
        orders: each in (1, 65536].

    Raises:
        ValueError: an argument is outside its range.
    """
    return data_dependent_rdp(gnmax_log_q(votes, sigma), sigma, orders).sum(axis=0)


def confident_gnmax_rdp(
    votes: ArrayLike,
    threshold: float,
    sigma_threshold: float,
    sigma: float,
    orders: Sequence[float] = DEFAULT_ORDERS,
    answered: Sequence[bool] | None = None,
) -> Floats:
    """Return the data-dependent RDP of Confident-GNMax over all queries, one value per order.

    A query is answered, by GNMax with `sigma`, only if its largest count plus
    N(0, sigma_threshold^2) reaches the threshold. The check has two outcomes, so Theorem 6 applies
    with q the probability of the less likely one and, at sensitivity 1 instead of sqrt(2),
    sqrt(2) sigma_threshold.

    Args:
        votes: counts, shape (queries, classes).
        threshold: any finite number.
        sigma_threshold: > 0, noise of the check.
        sigma: > 0, noise of the answer.
        orders: each in (1, 65536].
        answered: which queries passed, one value each: only they pay for an answer, as in the
            paper. None charges every query: a bound that holds whatever passes.

    Raises:
        ValueError: an argument is outside its range.
    """
    counts = _checked_votes(votes)
    level = checks.real_number("threshold", threshold)
    noise = checks.positive("sigma_threshold", sigma_threshold)
    passed = np.ones(len(counts), dtype=bool) if answered is None else np.asarray(answered)
    if passed.shape != (len(counts),) or passed.dtype != np.bool_:
        raise ValueError(
            f"answered must hold one True or False for each of the {len(counts)} queries, "
            f"got {answered!r}"
        )
    log_q = log_ndtr(-np.abs(counts.max(axis=1) - level) / noise)
    check = data_dependent_rdp(log_q, math.sqrt(2.0) * noise, orders)
    answer = data_dependent_rdp(gnmax_log_q(counts, sigma), sigma, orders)
    return check.sum(axis=0) + answer[passed].sum(axis=0)


# --- Publishing the cost (Appendix B) -----------------------------------------------------------


def gnmax_local_sensitivities(votes: ArrayLike, sigma: float, order: float) -> Floats:
    """Return bounds on how much one teacher changes the cost, on votes d teachers away.

    Shape (teachers + 1,), summed over queries, non-decreasing in d = 0, 1, ... teachers.

    Write q = (m-1) Phi(-x), x the gap of a vote with m - 1 equal losers (Phi(-x) is erfc(x/sqrt 2)
    / 2). One changed vote moves every gap of counts by at most 2, that is by s = sqrt(2) / sigma in
    x, and because Phi(Phi^-1(p) + s) is concave in p it moves the x of any vote by at most s; this
    is B_U and B_L of the paper. So with f(x) the cost, non-increasing in x, the change is at most
    g(y) = f(y) - f(y + s) for a y within s below x; and d changes earlier, x was within d s. The
    maximum of g over that range is bounded cell by cell from f's monotonicity alone. The paper's
    Algorithms 3 to 5 follow the votes themselves and are somewhat tighter; they rest on a condition
    (their C6) that is not needed here.

    Args:
        votes: counts, shape (queries, classes), the same whole number of teachers in every query.
        sigma: > 0.
        order: in (1, 65536].

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
    # The floor takes a vote for less unanimous than it is, where the cost is 0 anyway.
    x = -ndtri_exp(np.maximum(log_q - math.log(losers), -1e6))
    lowest = float(x.min()) - (teachers + 2) * step
    highest = float(x.max()) + (teachers + 3) * step
    grid = lowest + cell * np.arange(math.ceil((highest - lowest) / cell) + 2.0)
    cost = _cost_table(grid, losers, sigma, order)
    change = cost[: -_CELLS - 1] - cost[_CELLS + 1 :]  # >= g anywhere in the cell
    return _window_maxima(change, (x - lowest) / cell, teachers)


def _cost_table(grid: Floats, losers: int, sigma: float, order: float) -> Floats:
    """Return f at each gap x, checked to be non-increasing."""
    log_q = np.minimum(0.0, math.log(losers) + log_ndtr(-grid))
    cost = data_dependent_rdp(log_q, sigma, (order,))[:, 0]
    if np.any(np.diff(cost) > 1e-15 + 1e-9 * cost[:-1]):
        raise ValueError(
            f"sigma = {sigma!r} and order = {order!r} must give a cost that grows with q "
            "(Papernot et al. 2018, condition C5) for smooth sensitivity; choose another order"
        )
    return np.minimum.accumulate(cost)


def _window_maxima(change: Floats, positions: Floats, teachers: int) -> Floats:
    """Return, for each d, the sum over queries of the largest change within reach."""
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
    """Return max over d of exp(-beta d) LS_d (Nissim, Raskhodnikova, Smith 2007).

    Args:
        local_sensitivities: LS_d >= 0 at distance d = 0, 1, ..., up to the farthest data set.
        beta: > 0.

    Raises:
        ValueError: an argument is outside its range.
    """
    beta = checks.positive("beta", beta)
    values = np.asarray(local_sensitivities, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.all(values >= 0.0):
        raise ValueError(f"local_sensitivities must be a list of numbers >= 0, got {values!r}")
    return float(np.max(values * np.exp(-beta * np.arange(values.size))))


def gnss_rdp(noise_multiplier: float, beta: float, order: float) -> float:
    """Return the RDP of f + SS N(0, noise_multiplier^2), SS a beta-smooth sensitivity of f.

    Exact for the worst neighbours that smoothness allows: N(0, 1) against N(k / sigma, k^2), in
    units of the first one's deviation, k = e^-beta (a smaller and a larger ratio of the deviations
    are both better). With s = order - (order - 1) e^(2 beta) it is
    order / (2 sigma^2 s) - beta - log(s) / (2 (order - 1)), infinite where s <= 0.

    The form in the paper's published code (named Theorem 23 there),
    order e^(2 beta) / sigma^2 + (beta order - log(1 - 2 order beta)/2) / (order - 1), lacks the
    factor 1/s on the first term and UNDER-REPORTS where order is near 1/(2 beta): at
    beta = 0.49 / order, which is used with it, order 20 and sigma 10 it gives 0.34, not 2.24.

    Args:
        noise_multiplier: sigma > 0.
        beta: > 0.
        order: in (1, 65536].

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
    """Return the data-dependent RDP of all queries at one order, ready to be published.

    Guarantee: the answers together with one call of `publish` are (order, cost + release_rdp)-RDP
    in the sense of this module. Order, noise multiplier and beta must not depend on the votes.

    Args:
        votes: counts, shape (queries, classes), the same number of teachers in every query.
        sigma: > 0, noise of the queries.
        order: in (1, 65536].
        noise_multiplier: > 0, noise on the published cost over its smooth sensitivity.
        beta: > 0, how fast the smooth sensitivity may change; 0.2 / order if None.

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

"""RDP curves of mechanisms and of their compositions, for one client or for many at once."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedsim.accountant.checks import Floats, cached_by_bytes
from fedsim.accountant.composition import (
    AllocatedGaussian,
    Approximate,
    Concentrated,
    FixedSizeGaussian,
    Mechanism,
    ReplacedGaussian,
    SampledGaussian,
    Selection,
)
from fedsim.accountant.rdp.poisson import rdp_replaced_gaussian, rdp_sampled_gaussian
from fedsim.accountant.rdp.poisson_batch import is_supported, rdp_curves
from fedsim.accountant.rdp.random_allocation import rdp_random_allocation
from fedsim.accountant.rdp.selection import rdp_repeat_and_select
from fedsim.accountant.rdp.without_replacement import rdp_without_replacement

_CACHE_BYTES = 64 << 20  # a curve at the default orders has 1 kB


def total_rdp(steps: Iterable[tuple[Mechanism, int]], orders: tuple[float, ...]) -> Floats:
    """Return the RDP of the composition of all steps, float64 (orders,).

    The result leaves out the probability `leak` that a step reveals everything.

    Args:
        steps: pairs (mechanism, number of runs).
        orders: Rényi orders, each in (1, 65536].
    """
    total = np.zeros(len(orders))
    for mechanism, count in steps:
        total += count * mechanism_rdp(mechanism, orders)
    return total


def leak(steps: Iterable[tuple[Mechanism, int]]) -> float:
    """Return the probability that at least one (epsilon, delta)-DP step reveals everything.

    Such a step (`Approximate`) is dominated by one that reveals everything with probability delta
    and is epsilon-DP otherwise (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, Theorem 3.4's proof).
    At least one of n such steps reveals everything with probability 1 - (1 - delta)^n.
    """
    kept = math.fsum(
        count * math.log1p(-mechanism.delta)
        for mechanism, count in steps
        if isinstance(mechanism, Approximate)
    )
    return -math.expm1(kept)


@cached_by_bytes(_CACHE_BYTES)
def mechanism_rdp(mechanism: Mechanism, orders: tuple[float, ...]) -> Floats:
    """Return the RDP of one mechanism at each order, read-only float64 (orders,).

    Args:
        mechanism: the mechanism, run once.
        orders: Rényi orders in (1, 65536]; the function does not check them.
    """
    match mechanism:
        case SampledGaussian():
            curve = rdp_sampled_gaussian(*mechanism, orders)
        case ReplacedGaussian(q, z):
            curve = rdp_replaced_gaussian(q, z, orders)
        case FixedSizeGaussian(q, z):
            curve = rdp_without_replacement(q, z, orders)
        case AllocatedGaussian(batches, z):
            curve = rdp_random_allocation(batches, z, orders)
        case Concentrated():
            curve = mechanism.rho * np.array(orders)
        case Approximate():
            curve = _pure_rdp(mechanism.epsilon, np.array(orders))
        case Selection():
            one_run = total_rdp(mechanism.steps, orders)
            curve = rdp_repeat_and_select(orders, one_run, mechanism.mean, mechanism.shape)
        case _:  # pragma: no cover
            raise TypeError(f"not a mechanism: {mechanism!r}")
    curve.setflags(write=False)
    return curve


def _pure_rdp(epsilon: float, alphas: Floats) -> Floats:
    """Return the RDP of any epsilon-DP mechanism, bounded by that of randomised response.

    Randomised response has the losses +-epsilon with probability 1 / (1 + e^-+epsilon). It
    dominates every epsilon-DP pair; its RDP is log((e^(a e) + e^((1-a) e)) / (1 + e^e)) / (a - 1),
    at most epsilon and at most a epsilon^2 / 2 (Bun, Steinke 2016, Proposition 3.3). The latter is
    used where the logarithm has no digits left.
    """
    with np.errstate(over="ignore"):
        simple = np.minimum(epsilon, 0.5 * alphas * epsilon * epsilon)
    if epsilon < 1e-4:
        return simple
    log_sum = np.logaddexp(alphas * epsilon, (1.0 - alphas) * epsilon)
    exact = (log_sum - np.logaddexp(0.0, epsilon)) / (alphas - 1.0)
    return np.minimum(exact, simple)


def rdp_table(mechanisms: Sequence[Mechanism], orders: tuple[float, ...]) -> Floats:
    """Return the RDP of each mechanism at each order, float64 (mechanisms, orders).

    Guarantee: the values are those of `mechanism_rdp`, to 1e-12 relative.

    Args:
        mechanisms: the mechanisms, each run once.
        orders: Rényi orders, each in (1, 65536].
    """
    table = np.empty((len(mechanisms), len(orders)))
    sampled = [i for i, kind in enumerate(mechanisms) if isinstance(kind, SampledGaussian)]
    pairs = np.array([mechanisms[i] for i in sampled], dtype=np.float64).reshape(-1, 2)
    rates, noises = pairs.T
    covered = is_supported(rates, noises, orders)
    batched = np.array(sampled, dtype=np.intp)[covered]
    table[batched] = rdp_curves(rates[covered], noises[covered], orders)
    for row in np.setdiff1d(np.arange(len(mechanisms)), batched):
        table[row] = mechanism_rdp(mechanisms[row], orders)
    return table


def epsilons_from_rdp(
    orders: Sequence[float], rdp: Floats, delta: float, leaks: Floats | None = None
) -> Floats:
    """Return the epsilon of every client at `delta` by the "tight" conversion, float64 (clients,).

    Args:
        orders: Rényi orders, each > 1.
        rdp: float64 (clients, orders), the RDP of each client, >= 0; infinity is allowed.
        delta: in (0, 1).
        leaks: float64 (clients,), the probability in [0, 1] that some step reveals the client's
            data, see `leak`; by default 0.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    spent = np.zeros(rdp.shape[0]) if leaks is None else leaks
    left = (delta - spent) / np.maximum(1.0 - spent, 1e-300)
    with np.errstate(divide="ignore"):  # nothing left: epsilon is infinite
        cost = -np.log(np.maximum(left, 0.0))[:, None] - np.log(alphas)
    epsilons = (rdp + np.log1p(-1.0 / alphas) + cost / (alphas - 1.0)).min(axis=1)
    total_variation = np.sqrt(-np.expm1(-rdp.min(axis=1)))
    return np.where((left > 0.0) & (left >= total_variation), 0.0, np.maximum(0.0, epsilons))

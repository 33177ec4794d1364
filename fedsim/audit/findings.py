"""What the observations of one client prove about its mechanism, and about the ε it claims."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.arrays import Floats
from fedsim.audit.evidence import (
    Interval,
    correlation_interval,
    deviation_interval,
    gdp_lower_bound,
    known_deviation_mean_interval,
    rate_interval,
)
from fedsim.audit.observation import Observations
from fedsim.clients.budget.affordable_steps import epsilon_of_steps
from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.sampling import PoissonSampling, Sampling

LOOKS = 11  # ends of intervals that could be wrong for one client: its share of the false alarms
_BETWEEN = 0.5  # a coordinate above half a canary is taken for one


@dataclass(frozen=True)
class Claim:
    """What a client's account says of its mechanism.

    Attributes:
        epsilon: after all its steps.
        delta: at which.
        noise: σ / C of the noise where the canaries are.
        sampling: how lots are drawn.
        steps: over the whole run.
        accountant: what ε is computed by.
        adjacency: what it protects against.
    """

    epsilon: float
    delta: float
    noise: float
    sampling: Sampling
    steps: int
    accountant: AccountantName
    adjacency: Adjacency


@dataclass(frozen=True)
class Findings:
    """What was measured on one client.

    Attributes:
        epsilon: of the whole run, with a Gaussian that is told apart as well as the attack proved,
            and the sampling that it proved.
        noise: measured σ / C over the claimed one.
        contribution: of a canary in the lot, in units of C; at most 1 if clipping holds.
        rate: share of examples in a lot, over the one that was charged.
        spread: variance of how often each example was drawn, over that of independent lots; 1 where
            the client claims no independent ones.
        repeated: correlation of noise between neighbouring steps, and between rounds.
        noise_rows: the noise of each step (steps, canaries), NaN where a canary was in the lot.
    """

    epsilon: float
    noise: Interval
    contribution: Interval
    rate: Interval
    spread: Interval
    repeated: tuple[Interval, Interval]
    noise_rows: Floats


def findings(seen: Observations, claim: Claim, *, round_steps: int, miss: float) -> Findings:
    """Return what observations prove.

    Guarantee: each end of an interval is wrong with probability at most `miss`, and there are
    `LOOKS` of them; a sound mechanism has `violations` no more often than that, all together.

    Args:
        seen: the canaries of a client.
        claim: its account.
        round_steps: steps of a round.
        miss: in (0, 1/2).
    """
    inside = seen.inside
    found, missed = seen.released[~inside], seen.released[inside]
    mu = gdp_lower_bound(
        rate_interval(int((found > _BETWEEN).sum()), found.size, miss=miss),
        rate_interval(int((missed <= _BETWEEN).sum()), missed.size, miss=miss),
    )
    rate = _rate(seen, miss=miss)
    deviation = deviation_interval(found, miss=miss)
    rows = np.where(inside, np.nan, seen.released)
    return Findings(
        epsilon=_spent_at_least(claim, mu, rate.low),
        noise=_scaled(deviation, claim.noise),
        contribution=known_deviation_mean_interval(missed, deviation.estimate, miss=miss),
        rate=_scaled(rate, claim.sampling.sampling_rate),
        spread=_spread(seen, claim.sampling, miss=miss),
        repeated=(
            noise_correlation(rows[1:], rows[:-1], miss=miss),
            noise_correlation(rows[round_steps:], rows[:-round_steps], miss=miss),
        ),
        noise_rows=rows,
    )


def noise_correlation(one: Floats, other: Floats, *, miss: float) -> Interval:
    """Return the correlation of two tables of noise where both have some."""
    both = ~(np.isnan(one) | np.isnan(other))
    return correlation_interval(one[both], other[both], miss=miss)


def _rate(seen: Observations, *, miss: float) -> Interval:
    """Return how often examples are drawn; the low end is that of the most exposed one."""
    steps, examples = seen.drawn.shape
    pooled = rate_interval(int(seen.drawn.sum()), seen.drawn.size, miss=miss)
    most = int(seen.drawn.sum(axis=0).max(initial=0))
    exposed = rate_interval(most, steps, miss=miss / max(1, examples))
    return replace(pooled, low=max(pooled.low, exposed.low))


def _spread(seen: Observations, sampling: Sampling, *, miss: float) -> Interval:
    """Return how much the examples' counts vary, over Poisson sampling's binomial variance.

    Where examples take turns, as in a shuffled epoch, they hardly do. Only the upper end counts,
    and it is safe: the mean of squares is skewed to the right.
    """
    if not isinstance(sampling, PoissonSampling) or not 0.0 < sampling.rate < 1.0:
        return Interval(1.0, 1.0, 1.0)
    steps, examples = seen.drawn.shape
    rate = sampling.rate
    variance = steps * rate * (1.0 - rate)
    fourth = variance * (1.0 + 3.0 * (steps - 2) * rate * (1.0 - rate))
    squares = np.square(seen.drawn.sum(axis=0) - steps * rate)
    room = -float(ndtri(miss)) * math.sqrt((fourth - variance**2) / examples) / variance
    found = float(squares.mean()) / variance
    return Interval(found, found - room, found + room)


def _spent_at_least(claim: Claim, mu: float, rate: float) -> float:
    """Return ε of the claimed run with a Gaussian of the proven μ and the proven sampling."""
    if mu == 0.0:
        return 0.0
    sampling = claim.sampling
    if isinstance(sampling, PoissonSampling):
        sampling = PoissonSampling(rate)
    return epsilon_of_steps(
        DpSgdMechanism(sampling, FlatClipping(1.0), 1.0 / mu, 1.0),
        claim.steps,
        delta=claim.delta,
        accountant=claim.accountant,
        adjacency=claim.adjacency,
    )


def _scaled(interval: Interval, unit: float) -> Interval:
    return Interval(interval.estimate / unit, interval.low / unit, interval.high / unit)


def violations(found: Findings, claim: Claim) -> Iterator[str]:
    """Yield what does not fit the claim, in words."""
    if found.epsilon > claim.epsilon:
        yield f"at least ε = {found.epsilon:.4g} is spent, and {claim.epsilon:.4g} is claimed"
    if found.noise.high < 1.0:
        yield f"the noise is {found.noise.estimate:.3g} of what is charged"
    if found.contribution.low > 1.0:
        yield f"an example contributes {found.contribution.estimate:.3g} times the clipping bound"
    if found.rate.low > 1.0:
        yield f"lots hold {found.rate.low:.3g} times the share of an example's charge, or more"
    if found.spread.high < 1.0:
        yield (
            f"lots are not drawn independently: examples' counts vary {found.spread.estimate:.3g} "
            "times as much as charged"
        )
    for interval, where in zip(found.repeated, ("step to step", "round to round"), strict=True):
        if interval.excludes(0.0):
            yield f"noise repeats from {where}: correlation {interval.estimate:.3g}"

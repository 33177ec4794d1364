"""Statistical findings on one client: its measured mechanism, beside the claimed one."""

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
from fedsim.core.formatting import epsilon_text, least_epsilon_text

NUM_INTERVAL_ENDS = 11  # per client; each one may be wrong, so they share the false alarms
_CANARY_THRESHOLD = 0.5  # in clipping bounds; the attack reports a canary above it


@dataclass(frozen=True)
class Claim:
    """The mechanism that a client is charged for.

    Attributes:
        epsilon: claimed ε after all steps.
        delta: δ of the claim.
        noise: noise multiplier σ / C on the canaries' coordinates.
        sampling: the sampling scheme of the lots.
        steps: number of steps over the whole run.
        accountant: the accountant that computes ε.
        adjacency: the neighbouring relation of the claim.
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
    """Measurements on one client.

    Attributes:
        epsilon: lower bound of ε for the whole run, from the measured μ and sampling rate.
        noise: measured σ / C over the claimed one.
        contribution: mean of a canary in the lot, in units of C; at most 1 if clipping holds.
        sampling_rate: measured sampling rate over the charged one.
        count_variance: variance of how often each example was drawn, over that of independent
            lots; 1 if the client does not claim independent lots.
        noise_correlations: correlation of noise from step to step, and from round to round.
        noise_rows: the noise of each step (steps, canaries), NaN for a canary in the lot.
    """

    epsilon: float
    noise: Interval
    contribution: Interval
    sampling_rate: Interval
    count_variance: Interval
    noise_correlations: tuple[Interval, Interval]
    noise_rows: Floats


def measure_leakage(seen: Observations, claim: Claim, *, round_steps: int, miss: float) -> Findings:
    """Return the findings of a client's observations.

    Guarantee: each end of an interval is wrong with probability at most `miss`. A correct mechanism
    has `violations` with probability at most `NUM_INTERVAL_ENDS` times `miss`.

    Args:
        seen: the observed canaries of a client.
        claim: the client's claimed mechanism.
        round_steps: number of steps in a round.
        miss: probability that an end is wrong, in (0, 1/2).
    """
    inside = seen.inside
    noise, canaries = seen.released[~inside], seen.released[inside]
    mu = gdp_lower_bound(
        rate_interval(int((noise > _CANARY_THRESHOLD).sum()), noise.size, miss=miss),
        rate_interval(int((canaries <= _CANARY_THRESHOLD).sum()), canaries.size, miss=miss),
    )
    rate = _sampling_rate(seen, miss=miss)
    deviation = deviation_interval(noise, miss=miss)
    rows = np.where(inside, np.nan, seen.released)
    return Findings(
        epsilon=_epsilon_lower_bound(claim, mu, rate.low),
        noise=_scale(deviation, claim.noise),
        contribution=known_deviation_mean_interval(canaries, deviation.estimate, miss=miss),
        sampling_rate=_scale(rate, claim.sampling.sampling_rate),
        count_variance=_count_variance(seen, claim.sampling, miss=miss),
        noise_correlations=(
            noise_correlation(rows[1:], rows[:-1], miss=miss),
            noise_correlation(rows[round_steps:], rows[:-round_steps], miss=miss),
        ),
        noise_rows=rows,
    )


def noise_correlation(one: Floats, other: Floats, *, miss: float) -> Interval:
    """Return the correlation of two tables of noise (steps, canaries); NaN entries do not count.

    Args:
        one: noise, in clipping bounds.
        other: noise of the same shape.
        miss: probability that an end is wrong, in (0, 1/2).
    """
    both = ~(np.isnan(one) | np.isnan(other))
    return correlation_interval(one[both], other[both], miss=miss)


def _sampling_rate(seen: Observations, *, miss: float) -> Interval:
    """Return the sampling rate; the low end also covers the most often drawn example."""
    steps, examples = seen.drawn.shape
    pooled = rate_interval(int(seen.drawn.sum()), seen.drawn.size, miss=miss)
    most = int(seen.drawn.sum(axis=0).max(initial=0))
    exposed = rate_interval(most, steps, miss=miss / max(1, examples))
    return replace(pooled, low=max(pooled.low, exposed.low))


def _count_variance(seen: Observations, sampling: Sampling, *, miss: float) -> Interval:
    """Return the variance of the examples' counts, over Poisson sampling's binomial variance.

    Lots of a shuffled epoch have almost no variance. Only the upper end is used. It is
    conservative, because the mean of squares is skewed to the right.
    """
    if not isinstance(sampling, PoissonSampling) or not 0.0 < sampling.rate < 1.0:
        return Interval(1.0, 1.0, 1.0)
    steps, examples = seen.drawn.shape
    rate = sampling.rate
    variance = steps * rate * (1.0 - rate)
    fourth = variance * (1.0 + 3.0 * (steps - 2) * rate * (1.0 - rate))
    squares = np.square(seen.drawn.sum(axis=0) - steps * rate)
    margin = -float(ndtri(miss)) * math.sqrt((fourth - variance**2) / examples) / variance
    estimate = float(squares.mean()) / variance
    return Interval(estimate, estimate - margin, estimate + margin)


def _epsilon_lower_bound(claim: Claim, mu: float, rate: float) -> float:
    """Return ε of the claimed run with the measured μ and sampling rate."""
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


def _scale(interval: Interval, unit: float) -> Interval:
    return Interval(interval.estimate / unit, interval.low / unit, interval.high / unit)


def violations(found: Findings, claim: Claim) -> Iterator[str]:
    """Yield a message for each finding that contradicts the claim."""
    if found.epsilon > claim.epsilon:
        spent, claimed = least_epsilon_text(found.epsilon), epsilon_text(claim.epsilon)
        yield f"at least ε = {spent} is spent, and {claimed} is claimed"
    if found.noise.high < 1.0:
        yield f"the noise is {found.noise.estimate:.3g} of what is charged"
    if found.contribution.low > 1.0:
        yield f"an example contributes {found.contribution.estimate:.3g} times the clipping bound"
    if found.sampling_rate.low > 1.0:
        yield f"lots hold {found.sampling_rate.low:.3g} times the charged sampling rate, or more"
    if found.count_variance.high < 1.0:
        yield (
            "lots are not drawn independently: examples' counts vary "
            f"{found.count_variance.estimate:.3g} times as much as charged"
        )
    for interval, where in zip(
        found.noise_correlations, ("step to step", "round to round"), strict=True
    ):
        if interval.excludes(0.0):
            yield f"noise repeats from {where}: correlation {interval.estimate:.3g}"

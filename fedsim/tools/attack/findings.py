"""Measured noise, clipping and ε of each audited client, compared with its claim."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtri

from fedsim.accountant import Gaussian
from fedsim.accountant.checks import Floats
from fedsim.clients.sampling.sampling import PoissonSampling, Sampling
from fedsim.core.formatting import epsilon_text, least_epsilon_text
from fedsim.core.text_formats import json_value
from fedsim.tools.attack.evidence import (
    Interval,
    correlation_interval,
    deviation_interval,
    distance_to_normal,
    rate_interval,
    run_lower_bound,
    shift_lower_bound,
)
from fedsim.tools.attack.observation import Claim, Observations
from fedsim.tools.attack.views import ObservedViews, UploadDistribution

NUM_INTERVAL_ENDS = 11  # per client; each one may be wrong, so they share the false alarms
_CONTRIBUTION_TOLERANCE = 1e-3
_THRESHOLDS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # of noise, in charged deviations from the best one
_RUN_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)  # of scores without a canary
_SHARED_COLUMNS = 100  # of the noise, to compare it with that of other clients


@dataclass(frozen=True)
class Findings:
    """The measurements of one client's mechanism, which has clip norm C and noise deviation σ."""

    epsilon: float  # lower bound for the whole run, by bounds on a step's noise and sampling rate
    epsilon_of_runs: float  # lower bound by nothing but the uploads of whole runs
    epsilon_estimate: float  # of the whole run, with the measured noise, clipping and sampling
    noise: Interval  # measured σ / C over the claimed one
    noise_distance: Interval  # largest, of the noise's distribution function to a Gaussian one
    contribution: Interval  # mean, least, largest that a canary adds to a sum, over C
    contribution_limit: float  # in units of C; rounding can explain contributions up to it
    sampling_rate: Interval  # over the charged one
    count_variance: Interval  # of how often examples were drawn, over that of independent batches
    noise_correlations: tuple[Interval, ...]  # of successive steps, and of successive rounds
    noise_rows: Floats  # (steps, some coordinates), in units of C, to compare clients
    uploads: UploadDistribution | None  # of a canary's value in an upload; None if not measured


def measure_leakage(seen: Observations, claim: Claim, *, miss: float) -> Findings:
    """Return the measurements that follow from the observations of a client.

    Guarantee: each interval end is wrong with probability at most `miss`. A correct mechanism has
    `violations` with probability at most `NUM_INTERVAL_ENDS` times `miss`.
    """
    contribution = _contribution(seen)
    shift = 0.0 if math.isnan(contribution.estimate) else contribution.estimate
    rows = seen.released - shift * seen.inside
    noise = np.sort(rows, axis=None)
    deviation = deviation_interval(noise, miss=miss)
    rate = _sampling_rate(seen, miss=miss)
    thresholds = [0.5 * shift + seen.charged_noise * place for place in _THRESHOLDS]
    of_run = partial(_epsilon_of, claim, seen.sampling)
    estimate = of_run(shift / deviation.estimate, rate.estimate) if shift else math.nan
    mu = shift_lower_bound(noise, contribution.low, thresholds, miss=miss) if shift else 0.0
    return Findings(
        epsilon=of_run(mu, rate.low),
        epsilon_of_runs=_epsilon_of_runs(seen, claim, miss=miss),
        epsilon_estimate=estimate,
        noise=_scale(deviation, seen.charged_noise),
        noise_distance=distance_to_normal(noise, deviation.estimate, miss=miss),
        contribution=contribution,
        contribution_limit=1.0 + _CONTRIBUTION_TOLERANCE + seen.contribution_error,
        sampling_rate=_scale(rate, seen.sampling.sampling_rate),
        count_variance=_count_variance(seen, miss=miss),
        noise_correlations=tuple(
            correlation_interval(rows[lag:], rows[:-lag], miss=miss)
            for lag in (1, seen.round_steps)
        ),
        noise_rows=rows[:, :_SHARED_COLUMNS].copy(),
        uploads=UploadDistribution.of(seen),
    )


def _contribution(seen: Observations) -> Interval:
    """Return the mean, minimum and maximum of the contributions; none of them is random."""
    added = seen.contributions
    if added.size == 0:
        return Interval(math.nan, -math.inf, math.inf)
    return Interval(float(added.mean()), max(0.0, float(added.min())), float(added.max()))


def _epsilon_of_runs(seen: Observations, claim: Claim, *, miss: float) -> float:
    """Return a lower bound of ε by sums of uploads; half of the free coordinates set thresholds."""
    rounds = max(1, -(-claim.steps // seen.round_steps))
    runs = len(seen.uploads) // rounds
    whole = seen.uploads[: runs * rounds]
    scores = whole.reshape(runs, rounds, whole.shape[1]).sum(axis=1)
    inside, outside = scores[:, seen.is_member], scores[:, ~seen.is_member]
    choosing, testing = outside[:, ::2], outside[:, 1::2]
    if not choosing.size:
        return 0.0
    thresholds = np.quantile(choosing, _RUN_QUANTILES).tolist()
    return run_lower_bound(testing, inside, thresholds, delta=claim.accounting.delta, miss=miss)


def _sampling_rate(seen: Observations, *, miss: float) -> Interval:
    """Return the sampling rate; the low end also covers the most often drawn example."""
    steps, examples = seen.drawn.shape
    pooled = rate_interval(int(seen.drawn.sum()), seen.drawn.size, miss=miss)
    most = int(seen.drawn.sum(axis=0).max(initial=0))
    exposed = rate_interval(most, steps, miss=miss / max(1, examples))
    return replace(pooled, low=max(pooled.low, exposed.low))


def _count_variance(seen: Observations, *, miss: float) -> Interval:
    """Return the variance of how often examples were drawn, over the variance by Poisson sampling.

    Only the upper end is used: shuffled epochs have almost no variance. It is conservative, because
    the mean of squares is skewed to the right.
    """
    sampling = seen.sampling
    if not isinstance(sampling, PoissonSampling) or not 0.0 < sampling.rate < 1.0:
        return Interval(1.0, 1.0, 1.0)
    (steps, examples), rate = seen.drawn.shape, sampling.rate
    variance = steps * rate * (1.0 - rate)
    fourth = variance * (1.0 + 3.0 * (steps - 2) * rate * (1.0 - rate))
    squares = np.square(seen.drawn.sum(axis=0) - steps * rate)
    margin = -float(ndtri(miss)) * math.sqrt((fourth - variance**2) / examples) / variance
    estimate = float(squares.mean()) / variance
    return Interval(estimate, estimate - margin, estimate + margin)


def _epsilon_of(claim: Claim, sampling: Sampling, mu: float, rate: float) -> float:
    """Return ε of the claimed run, with μ and the sampling rate replaced."""
    if mu == 0.0:
        return 0.0
    if isinstance(sampling, PoissonSampling):
        sampling = PoissonSampling(rate)
    return claim.accounting.epsilon(sampling.charges(Gaussian(1.0 / mu), 0, claim.steps))


def _scale(interval: Interval, unit: float) -> Interval:
    return Interval(interval.estimate / unit, interval.low / unit, interval.high / unit)


def violations(findings: Findings, claim: Claim) -> Iterator[str]:
    """Yield a message for each measurement that contradicts the claim."""
    claimed, least = epsilon_text(claim.epsilon), least_epsilon_text
    if findings.epsilon > claim.epsilon:
        yield f"at least ε = {least(findings.epsilon)} is spent, and {claimed} is claimed"
    if findings.epsilon_of_runs > claim.epsilon:
        shown = least(findings.epsilon_of_runs)
        yield f"uploads of a run show at least ε = {shown}, and {claimed} is claimed"
    if findings.noise.high < 1.0:
        yield f"the noise is {findings.noise.estimate:.3g} of what is charged"
    if findings.noise_distance.low > 0.0:
        distance = findings.noise_distance.estimate
        yield f"the noise is not Gaussian: its distribution function is off by {distance:.2g}"
    if math.inf > findings.contribution.high > findings.contribution_limit:
        yield f"an example contributes {findings.contribution.high:.4g} times the clipping bound"
    if findings.sampling_rate.low > 1.0:
        rate = findings.sampling_rate.low
        yield f"batches hold {rate:.3g} times the charged sampling rate, or more"
    if findings.count_variance.high < 1.0:
        yield (
            "batches are not drawn independently: examples' counts vary "
            f"{findings.count_variance.estimate:.3g} times as much as charged"
        )
    lags = "step to step", "round to round"
    for interval, where in zip(findings.noise_correlations, lags, strict=True):
        if interval.excludes(0.0):
            yield f"noise repeats from {where}: correlation {interval.estimate:.3g}"


@dataclass(frozen=True)
class ClientAudit:
    """The audit of one client: its measurements and its claim against one adversary."""

    client: int
    num_examples: int
    claim: Claim
    findings: Findings
    views: ObservedViews | None = None  # None if no upload was measured, or sums are seen

    @property
    def violations(self) -> tuple[str, ...]:
        """One message for each measurement that contradicts the client's claim."""
        return tuple(violations(self.findings, self.claim))

    def to_json(self) -> dict[str, Any]:
        """Return the audit of the client as JSON values; an infinite or unknown number is null."""
        findings = self.findings
        views = vars(self.views or ObservedViews(math.nan, math.nan, math.nan))
        content = {
            "client": self.client,
            "against": self.claim.against,
            "examples": self.num_examples,
            "delta": self.claim.accounting.delta,
            "epsilon_claimed": self.claim.epsilon,
            "epsilon_certified": findings.epsilon,
            "epsilon_certified_of_runs": findings.epsilon_of_runs,
            "epsilon_estimated": {"steps": findings.epsilon_estimate, **views},
            "noise_over_charged": findings.noise,
            "noise_distance_to_gaussian": findings.noise_distance,
            "contribution_over_bound": findings.contribution,
            "sampling_over_charged": findings.sampling_rate,
            "count_variance_over_charged": findings.count_variance,
            "noise_correlation": findings.noise_correlations,
            "violations": self.violations,
        }
        return json_value(content)


@dataclass(frozen=True)
class Audit:
    """The audit of an experiment: the results of all audited clients."""

    name: str
    clients: tuple[ClientAudit, ...]  # one for each audited client and adversary
    num_clients: int  # of the federation
    steps: int  # audited of each client
    confidence: float  # probability that a correct federation has no violation
    shared_noise: tuple[str, ...]  # a message for each pair of clients with correlated noise

    @property
    def violations(self) -> tuple[str, ...]:
        """One message for each measurement that contradicts a claim; also all of `shared_noise`."""
        lines = list[str]()
        for row in self.clients:
            where = "" if row.claim.against == "server" else f", in {row.claim.against}"
            lines += [f"client {row.client}{where}: {text}" for text in row.violations]
        return (*lines, *self.shared_noise)

    @property
    def num_audited(self) -> int:
        """Number of audited clients."""
        return len({client.client for client in self.clients})

    def to_json(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "name": self.name,
            "steps": self.steps,
            "confidence": self.confidence,
            "num_clients": self.num_clients,
            "clients": [client.to_json() for client in self.clients],
            "violations": list(self.violations),
        }

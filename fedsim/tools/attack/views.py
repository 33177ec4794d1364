"""Estimates of ε against three adversaries that see a whole run, for each audited client.

Each adversary adds up the values of a canary's coordinate over the run: in the client's uploads, in
the sums of all clients' updates (secure aggregation), or in the final model. The total is nearly
Gaussian, both with and without the canary, and the estimate is the ε between the two Gaussians
(Andrew et al. 2023, arXiv:2302.03098). It is no bound, since a better attack may learn more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import log_ndtr

from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.federation.federation import Federation
from fedsim.tools.attack.observation import Observations

_STEPS = 100  # of bisection
_MOST_EPSILON = 1e6


def gaussian_pair_epsilon(shift: float, outside: float, inside: float, *, delta: float) -> float:
    """Return the ε at δ between N(0, outside²) and N(shift, inside²), in the worse direction."""

    def delta_is_exceeded(epsilon: float) -> bool:
        pairs = (inside, outside), (outside, inside)
        return any(_delta(shift, p, q, epsilon) > delta for p, q in pairs)

    low, high = 0.0, 1.0
    if not delta_is_exceeded(low):
        return 0.0
    while delta_is_exceeded(high):
        high *= 2.0
        if high > _MOST_EPSILON:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if delta_is_exceeded(middle) else (low, middle)
    return high


def _delta(shift: float, p: float, q: float, epsilon: float) -> float:
    """Return P(A) − e^ε Q(A) of the set A where log P(x) / Q(x) > ε, in closed form.

    Here P = N(0, p²) and Q = N(shift, q²). The log ratio is a x² + b x + c, so A is a half-line, an
    interval or its complement. Below all roots it has the sign of a, else of −b, else of c; each
    root changes the sign.
    """
    a = 0.5 / q**2 - 0.5 / p**2
    b = -shift / q**2
    c = 0.5 * (shift / q) ** 2 + math.log(q / p) - epsilon
    intervals = list(pairwise([-math.inf, *_roots(a, b, c), math.inf]))
    first = 0 if (a or -b or c) > 0.0 else 1
    return sum((_mass(*ends, shift, p, q, epsilon) for ends in intervals[first::2]), 0.0)


def _roots(a: float, b: float, c: float) -> list[float]:
    """Return the real roots of a x² + b x + c, ascending, without cancellation."""
    square = b * b - 4.0 * a * c
    if square <= 0.0:
        return []
    stable = -0.5 * (b + math.copysign(math.sqrt(square), b))
    return sorted([c / stable, stable / a] if a else [c / stable])


def _mass(low: float, high: float, shift: float, p: float, q: float, epsilon: float) -> float:
    """Return P − e^ε Q of the interval (low, high), for P = N(0, p²) and Q = N(shift, q²)."""
    return math.exp(_log_interval(low / p, high / p)) - math.exp(
        epsilon + _log_interval((low - shift) / q, (high - shift) / q)
    )


def _log_interval(low: float, high: float) -> float:
    """Return log(Φ(high) − Φ(low)), precise in both tails."""
    if low > 0.0:
        low, high = -high, -low
    upper, lower = float(log_ndtr(high)), float(log_ndtr(low))
    return upper + math.log1p(-math.exp(lower - upper)) if upper > lower else -math.inf


@dataclass(frozen=True)
class UploadDistribution:
    """The distribution of the values of a canary's coordinate in one upload."""

    shift: float  # mean of what a canary in the data adds
    spread: float  # variance of what it adds, due to random batches
    noise: float  # variance of the noise

    @classmethod
    def of(cls, seen: Observations) -> "UploadDistribution | None":
        """Return the measured distribution; None if too few values of one law were measured."""
        outside, signals = seen.uploads[:, ~seen.is_member], seen.signals
        if not seen.is_fixed or signals.size < 2 or outside.size == 0:
            return None
        return cls(float(signals.mean()), float(signals.var()), float(np.square(outside).mean()))

    def epsilon(self, factors: Sequence[float], noise: float, *, delta: float) -> float:
        """Return the estimated ε of a sum of uploads with these factors and this noise variance."""
        shift = abs(self.shift) * sum(factors)
        spread = self.spread * sum(factor**2 for factor in factors)
        outside, inside = math.sqrt(noise), math.sqrt(noise + spread)
        return gaussian_pair_epsilon(shift, outside, inside, delta=delta)


@dataclass(frozen=True)
class ObservedViews:
    """The estimated ε of a whole run for each adversary."""

    uploads: float  # every upload of the client
    sums: float  # the sum of all updates of every round
    final_model: float


def estimate_views(
    distribution: UploadDistribution,
    client: int,
    rounds: Iterable[Sequence[int]],
    noise: Sequence[float],
    weights: Sequence[float],
    *,
    delta: float,
) -> ObservedViews:
    """Return the estimated ε of one client; `rounds` has participants, `noise` upload variances."""
    shares: list[float] = []  # of the client in the mean updates of its rounds
    in_sums = in_model = 0.0  # variances of noise
    for participants in rounds:
        weight = sum(weights[k] for k in participants)
        if not weight:
            continue
        variance = sum(weights[k] ** 2 * noise[k] for k in participants) / weight**2
        in_model += variance
        if client in participants:
            shares.append(weights[client] / weight)
            in_sums += variance / shares[-1] ** 2
    ones = [1.0] * len(shares)
    seen = (ones, distribution.noise * len(ones)), (ones, in_sums), (shares, in_model)
    return ObservedViews(*(distribution.epsilon(*one, delta=delta) for one in seen))


def views_of(
    federation: Federation, distributions: Mapping[int, UploadDistribution | None]
) -> dict[int, ObservedViews]:
    """Return the estimated ε of every audited client whose uploads were measured, by client.

    With a server optimizer or model averaging, the estimate for the final model is NaN.
    """
    known = {client: given for client, given in distributions.items() if given is not None}
    plans, participation = federation.plan.clients, federation.plan.participation
    if plans is None or not known:
        return {}
    rounds: list[list[int]] = [[] for _ in range(participation.rounds)]
    for client, plan in enumerate(plans):
        affordable = federation.plan.steps.rounds_in(client, plan.steps_to_take)
        for number in participation.rounds_of(client)[:affordable]:
            rounds[number - 1].append(client)
    terms = federation.plan.client_privacy or ()
    charged = list[float]()  # variance of each client's noise in an upload, up to a common factor
    for plan, term in zip(plans, terms, strict=True):
        release = plan.release_as(DpSgdMechanism)
        deviation = release.noise_multiplier * term.privacy.clip_norm / release.expected_batch
        charged.append(deviation**2)
    # The ratio of one client is that of all, since all have the same optimizer.
    ratio = float(np.mean([given.noise / charged[client] for client, given in known.items()]))
    noise = [known[k].noise if k in known else ratio * charge for k, charge in enumerate(charged)]
    weights = list(map(float, federation.plan.weights.values))
    settings = federation.experiment.federation
    is_sum_of_rounds = settings.algorithm.name == "fedavg" and settings.ema_decay is None
    views: dict[int, ObservedViews] = {}
    for client, given in known.items():
        view = estimate_views(given, client, rounds, noise, weights, delta=plans[client].delta)
        views[client] = view if is_sum_of_rounds else replace(view, final_model=math.nan)
    return views

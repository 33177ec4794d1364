"""Upper bounds on attacks that follow from a ledger's privacy profile δ(ε).

δ(ε) is computed at some points only. Between them it is bounded by two facts: the true δ(ε) never
increases, and is convex in e^ε (Dong, Roth, Su 2019, arXiv:1905.02383, Proposition 2.12 and its
dual). So it lies below the chord between any two points above it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from fedsim.accountant.accountants import AccountantChoice, make_accountant
from fedsim.accountant.events import Adjacency, Event
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger
from fedsim.accountant.pld.privacy_profile import gaussian_log_delta
from fedsim.accountant.sampler_slack import delta_with_slack, epsilon_with_slack

_NUM_POINTS = 400
_SLACK_PER_DELTA = 0.01  # largest distance of the Gaussian summary below the curve, as a share of δ
_MIN_MU, _MAX_MU = 1e-9, 1e3
_MAX_EPSILON = 500.0  # e^ε must fit into a float; bounds are useless far below it
_Chord = tuple[tuple[float, float], tuple[float, float]]  # between two neighbours of a curve


@dataclass(frozen=True)
class Profile:
    """The privacy profile δ(ε) of a ledger, as points on an upper bound.

    By the Gaussian-DP parameter μ, no attack has a true-positive rate more than `slack` above that
    of the best test of N(0, 1) against N(μ, 1). `mu` is None if no useful μ exists.
    """

    client: int  # with this ledger; `ledger_profile` knows no client and sets 0
    epsilon: float  # of the ledger at `delta`
    delta: float  # of the guarantee
    curve: tuple[tuple[float, float], ...]  # pairs (ε, δ), ascending; each holds for the releases
    mu: float | None
    slack: float  # δ / 100, or the last δ of the curve if that is larger

    def true_positive_bound(self, false_positive_rate: float) -> float:
        """Return an upper bound on any attack's true-positive rate at a false-positive rate.

        Raises:
            ValueError: the rate is outside [0, 1].
        """
        return self.true_positive_bounds([false_positive_rate])[0]

    def true_positive_bounds(self, false_positive_rates: Sequence[float]) -> list[float]:
        """Return an upper bound on any attack's true-positive rate at each false-positive rate.

        Guarantee: for every (ε, δ) of the curve and every test, TPR <= e^ε FPR + δ (Wasserman,
        Zhou 2010) and, with the two data sets exchanged, 1 - TPR >= e^-ε (1 - δ - FPR). The
        result is the smallest of these bounds and the bound by `mu`. It is never above the bound
        of the pair (ε, δ) alone.

        Raises:
            ValueError: a rate is outside [0, 1].
        """
        for rate in false_positive_rates:
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"false_positive_rate must be in [0, 1], got {rate!r}")
        growths, deltas = self._growths
        rates = np.array(false_positive_rates, dtype=np.float64)[:, None]
        falling = 1.0 - np.maximum(0.0, (1.0 - deltas - rates) / growths)
        bounds = np.minimum(growths * rates + deltas, falling).min(axis=1, initial=1.0).tolist()
        if self.mu is None:
            return bounds
        best = (gaussian_true_positive_rate(self.mu, rate) for rate in false_positive_rates)
        return [min(bound, power + self.slack) for bound, power in zip(bounds, best, strict=True)]

    @cached_property
    def _growths(self) -> tuple[np.ndarray, np.ndarray]:
        """Arrays e^ε and δ of all pairs with ε up to 500, above which none is useful."""
        pairs = (*self.curve, (self.epsilon, self.delta))
        # Not np.exp: its last bits depend on the processor, and the bounds are in a file.
        bounded = [(math.exp(e), delta) for e, delta in pairs if e <= _MAX_EPSILON]
        growths, deltas = np.array(bounded).reshape(-1, 2).T
        return growths, deltas


def ledger_profile(
    ledger: PrivacyLedger,
    delta: float,
    accountant: AccountantChoice = "pld",
    adjacency: Adjacency = "zero_out",
) -> Profile | None:
    """Return the privacy profile of a ledger; None if its ε at `delta` is infinite.

    If this ε is above 500, the profile has no curve and no μ. All figures include the error of the
    noise sampler.

    Raises:
        ValueError: the accountant cannot account for an entry, or `delta` is not in (0, 1).

    Example:
        >>> from fedsim.accountant import Gaussian, PrivacyLedger
        >>> profile = ledger_profile(PrivacyLedger().record(Gaussian(1.0)), delta=1e-5)
        >>> round(profile.true_positive_bound(0.01), 3)
        0.092
    """
    return _profile_of(ledger.entries, delta, accountant, adjacency)


@lru_cache(maxsize=64)  # a run's ledgers are read for its files, its statement and its report
def _profile_of(
    entries: tuple[tuple[Event, int], ...],
    delta: float,
    accountant: AccountantChoice,
    adjacency: Adjacency,
) -> Profile | None:
    account = make_accountant(accountant, adjacency=adjacency)
    PrivacyLedger.of(entries).compose_into(account)
    slack, exact = _SLACK_PER_DELTA * delta, account.get_epsilon
    epsilon, end = epsilon_with_slack(exact, delta), epsilon_with_slack(exact, slack)
    if not math.isfinite(epsilon) or not end <= _MAX_EPSILON:
        return None if math.isinf(epsilon) else Profile(0, epsilon, delta, (), None, 0.0)
    exact_delta = cache(account.get_delta)
    points = _NUM_POINTS if end > 0.0 else 0
    epsilons = [0.0, *(end * k / points for k in range(1, points + 1))]
    curve = tuple((e, float(delta_with_slack(exact_delta, e))) for e in epsilons)
    slack = max(slack, curve[-1][1])  # room for the rounding of the accountant
    return Profile(0, epsilon, delta, curve, smallest_mu(curve, slack), slack)


def gaussian_true_positive_rate(mu: float, false_positive_rate: float) -> float:
    """Return the true-positive rate of the best test of N(0, 1) against N(μ, 1)."""
    return float(ndtr(mu + ndtri(false_positive_rate)))


def smallest_mu(curve: tuple[tuple[float, float], ...], slack: float) -> float | None:
    """Return the smallest μ with δ(ε) <= δ_μ(ε) + slack for all ε >= 0, rounded up.

    δ(ε) is the privacy profile that `curve` bounds: pairs (ε, δ) that ascend from ε = 0 to a δ of
    at most `slack` > 0. δ_μ(ε) is the profile of a Gaussian release: N(0, 1) against N(μ, 1). The
    result is None if the curve does not end below `slack`, or no μ up to 1,000 suffices.

    Guarantee: every test has TPR <= 1 - G_μ(FPR) + slack, where G_μ is the trade-off function of
    N(0, 1) and N(μ, 1) (Dong, Roth, Su 2019, Proposition 2.12: TPR rises by at most `slack` if δ
    does). Between two points of the curve, δ is below their chord. δ_μ, also convex in e^ε, is
    above its tangent at the left point. Both bounds are straight lines, so their order at the two
    ends decides. Beyond the last point δ(ε) <= slack. μ is rounded up by at most 1e-4 of itself.
    """
    if not curve or curve[0][0] != 0.0 or curve[-1][1] > slack:
        return None
    if curve[0][1] <= slack:
        return 0.0  # the total variation distance: no test gains more than the slack
    chords = list(pairwise(curve))
    random.Random(0).shuffle(chords)  # then few of them need more than all before
    mu = 0.0
    for chord in chords:
        if mu == 0.0 or not _is_above(mu, chord, slack):
            mu = _least_mu(chord, slack)
            if mu > _MAX_MU:
                return None
    return mu


def _least_mu(chord: _Chord, slack: float) -> float:
    """Return the smallest μ, rounded up, with δ_μ + `slack` above a chord; infinity above 1,000."""
    low, high = 0.0, 1e-3
    while not _is_above(high, chord, slack):
        low, high = high, 2.0 * high
        if high > _MAX_MU:
            return math.inf
    while high - low > 1e-4 * high and high > _MIN_MU:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _is_above(middle, chord, slack) else (middle, high)
    return high


def _is_above(mu: float, chord: _Chord, slack: float) -> bool:
    (left, delta), (right, next_delta) = chord
    at_left = math.exp(gaussian_log_delta(mu, left)) + slack
    # The tangent in x = e^ε falls by Φ(-ε/μ - μ/2) for each unit of x.
    fall = math.exp(float(log_ndtr(-left / mu - 0.5 * mu)) + left) * math.expm1(right - left)
    return at_left >= delta and at_left - fall >= next_delta

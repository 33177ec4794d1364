"""Estimates of ε from what three attackers see of a whole run.

Each attacker adds up a canary's coordinate over the run: of the client's uploads (the server), of
the sums of all clients' updates (the server under secure aggregation), or in the final model. The
result is nearly Gaussian, with or without the canary, and ε is that of the two Gaussians. A better
attack may see more: an estimate is no bound.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.audit.gaussian_pair import gaussian_pair_epsilon
from fedsim.audit.observation import Observations


@dataclass(frozen=True)
class UploadLaw:
    """Law of a canary's coordinate in one upload.

    Attributes:
        shift: mean of what a canary in the data adds.
        spread: variance of what it adds, by the random lots.
        noise: variance of the noise.
    """

    shift: float
    spread: float
    noise: float

    @classmethod
    def of(cls, seen: Observations) -> "UploadLaw | None":
        """Return the measured law; None where no canary was seen."""
        if seen.signals.size < 2:
            return None
        outside = seen.uploads[:, ~seen.is_member]
        if outside.size == 0:
            return None
        return cls(
            shift=float(seen.signals.mean()),
            spread=float(seen.signals.var()),
            noise=float(np.square(outside).mean()),
        )

    def epsilon(self, factors: Sequence[float], noise: float, *, delta: float) -> float:
        """Return ε of a weighted sum of a client's uploads.

        Args:
            factors: weight of each upload in the sum.
            noise: variance of all noise in the sum.
            delta: δ of the claim.
        """
        shift = abs(self.shift) * sum(factors)
        spread = self.spread * sum(factor**2 for factor in factors)
        outside, inside = math.sqrt(noise), math.sqrt(noise + spread)
        return gaussian_pair_epsilon(shift, outside, inside, delta=delta)


@dataclass(frozen=True)
class Views:
    """Estimated ε of a whole run, for each attacker.

    Attributes:
        uploads: of one who sees every upload of the client.
        sums: of one who sees the sum of all updates of every round.
        final_model: of one who sees the final model only.
    """

    uploads: float
    sums: float
    final_model: float


@dataclass(frozen=True)
class RoundNoise:
    """The noise of one round's mean update.

    Attributes:
        weight: sum of the participants' weights.
        variance: variance of the noise of the weighted mean.
    """

    weight: float
    variance: float


def noise_of_rounds(
    rounds: Iterable[Sequence[int]], noise: Mapping[int, float], weights: Sequence[float]
) -> tuple[RoundNoise, ...]:
    """Return the noise of every round.

    Args:
        rounds: the participants of each round.
        noise: variance of the noise of an upload, by client.
        weights: weight of each client's update.
    """
    found: list[RoundNoise] = []
    for participants in rounds:
        weight = sum(weights[one] for one in participants)
        squares = sum(weights[one] ** 2 * noise[one] for one in participants)
        found.append(RoundNoise(weight, squares / weight**2 if weight else 0.0))
    return tuple(found)


def estimate_views(
    law: UploadLaw,
    own_rounds: Iterable[int],
    weight: float,
    rounds: Sequence[RoundNoise],
    *,
    delta: float,
) -> Views:
    """Return the estimates of one client.

    Args:
        law: of the client's uploads.
        own_rounds: places of its rounds in `rounds`.
        weight: of its update in a sum.
        rounds: the noise of every round of the run.
        delta: δ of its claim.
    """
    own = [rounds[place] for place in own_rounds]
    shares = [weight / one.weight for one in own]
    ones = [1.0] * len(own)
    scaled = sum(one.variance / share**2 for one, share in zip(own, shares, strict=True))
    return Views(
        uploads=law.epsilon(ones, law.noise * len(own), delta=delta),
        sums=law.epsilon(ones, scaled, delta=delta),
        final_model=law.epsilon(shares, sum(one.variance for one in rounds), delta=delta),
    )

"""Privacy against an adversary who sees only the sum of the updates: rarely claimable.

Theorem B. Let every client j of a round upload u_j = a_j (sum of clipped per-example gradients +
N(0, σ_j² C_j² I)), let the adversary see only Σ_j u_j, know everything except one example of client
k, and let H be the honest clients of the round, k among them, that do not collude with it. Then the
round is a Gaussian mechanism, subsampled at k's own rate, with noise multiplier

    sqrt(Σ_{j in H} (a_j σ_j C_j)²) / (a_k C_k),

and rounds compose. It needs exactly one noisy step in a round. With two, the client's own first
step, weakly noised, can steer its second and amplify itself past the noise of all others. The
smaller epsilon is then false, not merely unproven.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.accountant import checks
from fedsim.accountant.accountants import AccountantName, make_accountant
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.events import Gaussian, PoissonSampled
from fedsim.accountant.sampler_slack import epsilon_with_slack


@dataclass(frozen=True, kw_only=True)
class UploadTerms:
    """The conditions of client k's uploads that theorem B needs.

    Attributes:
        local_steps: noisy steps in a round.
        optimizer: the client's optimizer.
        sampling: the sampling scheme of the lots.
        clipping: the clipping scheme.
        summed_securely: whether u_k is visible to client k alone.
        noise: "secure", or "seeded", which the seed reveals.
        participation: "fixed", or "by_value" where an update out of range stays out of the sum.
    """

    local_steps: int
    optimizer: str
    sampling: str
    clipping: str
    summed_securely: bool
    noise: Literal["secure", "seeded"]
    participation: Literal["fixed", "by_value"]


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """One round in which client k took part.

    Attributes:
        sensitivity: a_k C_k, what one example can change.
        noise: a_j σ_j C_j of every honest client of the sum, k's own among them.
    """

    sensitivity: float
    noise: tuple[float, ...]

    @property
    def noise_multiplier(self) -> float:
        """Noise of the sum over the sensitivity.

        Raises:
            ValueError: no honest client, negative noise, or a sensitivity that is not positive.
        """
        sensitivity = checks.positive("sensitivity", self.sensitivity)
        if not self.noise:
            raise ValueError("noise must hold at least client k's own, got none")
        return math.hypot(*(checks.non_negative("noise", value) for value in self.noise)) / (
            sensitivity
        )


@dataclass(frozen=True)
class AggregateView:
    """Client k's epsilon against the sums, or the reasons why none is claimed.

    Attributes:
        epsilon: None where nothing is claimed.
        reasons: the conditions that fail; empty where epsilon is claimed.
    """

    epsilon: float | None
    reasons: tuple[str, ...]

    @property
    def is_claimed(self) -> bool:
        """Whether theorem B holds for what ran."""
        return self.epsilon is not None

    def to_dict(self) -> dict[str, object]:
        """Return JSON values for a report."""
        if self.is_claimed:
            return {"epsilon": self.epsilon, "theorem": "B"}
        return {"epsilon": "not_claimed", "reason": "; ".join(self.reasons), "theorem": "B"}


def failed_conditions(terms: UploadTerms) -> tuple[str, ...]:
    """Return a sentence for each condition of theorem B that fails; empty if all hold."""
    conditions = (
        (terms.summed_securely, "updates are seen one by one"),
        (terms.local_steps == 1, f"local_steps > 1 ({terms.local_steps} noisy steps in a round)"),
        (terms.optimizer == "sgd", f"optimizer {terms.optimizer} is not linear in the noise"),
        (terms.sampling == "poisson", f"sampling {terms.sampling} is not Poisson"),
        (terms.clipping == "flat", f"clipping {terms.clipping} is not flat"),
        (terms.noise == "secure", "seeded noise is known to anyone who knows the seed"),
        (terms.participation == "fixed", "range_policy: error lets values decide who is summed"),
    )
    return tuple(words for holds, words in conditions if not holds)


def aggregate_view(
    terms: UploadTerms,
    rounds: Sequence[RoundView],
    *,
    sampling_rate: float,
    delta: float,
    accountant: AccountantName = "pld",
    adjacency: Adjacency = "zero_out",
) -> AggregateView:
    """Return client k's example-level epsilon against an adversary who sees only the sums.

    Guarantee: a number is returned only under every condition of theorem B; it never exceeds what
    the same accountant computes from k's own noise. The mechanism is the idealised one with real
    numbers: clients round before the sum, so finite precision is outside the proof.

    Args:
        terms: the conditions of the uploads.
        rounds: every round in which client k took part, with the noise that was really summed.
        sampling_rate: k's own rate.
        delta: in (0, 1).
        accountant: name of the accountant.
        adjacency: what one example may change; replace-one doubles the sensitivity.

    Raises:
        ValueError: a number outside its range.
    """
    reasons = failed_conditions(terms)
    if reasons:
        return AggregateView(None, reasons)
    composed = make_accountant(accountant, adjacency=adjacency)
    multipliers = Counter(view.noise_multiplier for view in rounds)
    for noise_multiplier, count in sorted(multipliers.items()):
        composed.compose(PoissonSampled(sampling_rate, Gaussian(noise_multiplier)), count)
    return AggregateView(epsilon_with_slack(composed.get_epsilon, delta), ())

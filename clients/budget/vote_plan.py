"""A client's plan for ballots: the least noise at which all of them stay within a target ε."""

import math
from collections.abc import Callable

import torch

from fedsim.accountant.search import MOST_NOISE, least_noise
from fedsim.clients.budget.affordable_steps import epsilon_of_steps
from fedsim.clients.budget.noise_search import calibrate_noise
from fedsim.clients.budget.plan import (
    PrivacyPlan,
    PrivacyPlanError,
    affordable_of,
    check_draws,
    delta_of,
)
from fedsim.clients.sampling.independent_lots import PoissonSampling
from fedsim.clients.settings import PrivacySettings
from fedsim.clients.updates.votes import Ballots, VoteMechanism


def plan_votes(
    privacy: PrivacySettings, ballots: Ballots, *, rounds: int, counts: int | None = None
) -> PrivacyPlan:
    """Return the plan of a client that votes in every round.

    Args:
        privacy: the `privacy` section, with the unit client.
        ballots: sizes and noise of the ballots.
        rounds: number of ballots.
        counts: counts of a ballot, queries · classes; None: not known, and nothing is checked.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, there is no noise, or it does not fit the
            grid.
    """
    delta = delta_of(privacy, 1)
    release = VoteMechanism(1.0, 1.0, ballots=ballots)
    if privacy.noise_multiplier is not None:
        noise = privacy.noise_multiplier
    else:
        noise = calibrate_votes(privacy, release, rounds, privacy.target_epsilon or 0.0, delta)
    if noise == 0.0:
        raise PrivacyPlanError(
            "privacy.noise_multiplier 0 adds no noise to any vote; use privacy: null for votes "
            "without privacy"
        )
    release = release.with_effective_noise(noise)
    if counts is not None:
        check_draws(rounds * counts)
        try:
            release = release.for_model(counts, torch.float64)
        except ValueError as error:
            raise PrivacyPlanError(f"the votes cannot be released: {error}") from error
    return PrivacyPlan(
        release=release,
        examples=0,
        delta=delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=rounds,
        affordable_steps=affordable_of(privacy, delta, release, rounds),
        secure_noise=privacy.noise == "secure",
    )


def calibrate_votes(
    privacy: PrivacySettings,
    release: VoteMechanism,
    rounds: int,
    target_epsilon: float,
    delta: float,
) -> float:
    """Return the least noise multiplier at which all ballots spend at most the target.

    Gaussian releases compose to one Gaussian release, so the noise of one gives that of all.

    Args:
        privacy: accountant and adjacency.
        release: of the client, at any noise.
        rounds: number of ballots.
        target_epsilon: > 0.
        delta: in (0, 1).

    Raises:
        PrivacyPlanError: no noise meets the target.
    """

    def epsilon(noise: float) -> float:
        return epsilon_of_steps(
            release.with_effective_noise(noise),
            rounds,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency,
        )

    try:
        one = calibrate_noise(
            PoissonSampling(1.0),
            1,
            target_epsilon=target_epsilon,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency,
        )
        noise = one * math.sqrt(release.cost(rounds)) * (1.0 + 2.0**-40)
        return _enough(noise, epsilon, target_epsilon)
    except ValueError as error:
        raise PrivacyPlanError(
            f"privacy.target_epsilon = {target_epsilon:g} at δ = {delta:g} cannot be met by "
            f"{rounds} ballots with noise_multiplier up to {MOST_NOISE:g}: ask fewer "
            f"pate.queries, or set more pate.sigma and pate.sigma_threshold ({error})"
        ) from error


def _enough(noise: float, epsilon: Callable[[float], float], target: float) -> float:
    """Return `noise`, or the result of a search where rounding puts its ε above the target."""
    return noise if epsilon(noise) <= target else least_noise(epsilon, target)

"""A client's plan for ballots: the least noise at which all of them stay within a target ε."""

import torch

from fedsim.accountant.search import MOST_NOISE
from fedsim.clients.budget.noise_search import noise_of_release
from fedsim.clients.budget.plan import (
    PrivacyPlan,
    PrivacyPlanError,
    affordable_of,
    check_draws,
    delta_of,
)
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
        noise = _calibrated(privacy, release, rounds, delta)
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


def _calibrated(
    privacy: PrivacySettings, release: VoteMechanism, rounds: int, delta: float
) -> float:
    """Return the least noise multiplier at which all ballots spend at most the target.

    Raises:
        PrivacyPlanError: no noise meets the target.
    """
    target = privacy.target_epsilon or 0.0
    try:
        return noise_of_release(
            release,
            rounds,
            target_epsilon=target,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency,
        )
    except ValueError as error:
        raise PrivacyPlanError(
            f"privacy.target_epsilon = {target:g} at δ = {delta:g} cannot be met by "
            f"{rounds} ballots with noise_multiplier up to {MOST_NOISE:g}: ask fewer "
            f"pate.queries, or set more pate.sigma and pate.sigma_threshold ({error})"
        ) from error

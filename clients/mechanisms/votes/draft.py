"""The draft of a client that votes in each of its rounds."""

from dataclasses import replace

from fedsim.clients.mechanisms.plan import Draft, PlanRequest, PrivacyPlanError, check_draws
from fedsim.clients.mechanisms.votes.ballots import Ballots
from fedsim.clients.mechanisms.votes.mechanism import VoteMechanism


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that votes in every round.

    Args:
        request: its settings, its rounds, its ballots as the problem, and the board as the model.

    Raises:
        TypeError: the problem is no ballots.
    """
    privacy, rounds, parameters = request.privacy, request.planned_rounds, request.parameters
    if not isinstance(request.problem, Ballots):
        raise TypeError(f"votes need ballots, got {request.problem!r}")
    like = VoteMechanism(1.0, 1.0, ballots=request.problem)

    def build(noise: float) -> VoteMechanism:
        if noise == 0.0:
            raise PrivacyPlanError(
                "privacy.noise_multiplier 0 adds no noise to any vote; use privacy: null for votes "
                "without privacy"
            )
        release = replace(like, noise_multiplier=noise)
        if parameters is None:
            return release
        check_draws(rounds * parameters.size)
        try:
            return release.for_model(parameters)
        except ValueError as error:
            raise PrivacyPlanError(f"the votes cannot be released: {error}") from error

    return Draft(
        public_size=1,
        examples=0,
        steps=rounds,
        given=privacy.noise_multiplier,
        like=like,
        build=build,
        hint="; ask fewer pate.queries, or set more pate.sigma and pate.sigma_threshold",
    )

"""Drafts of a client that releases its whole update, or votes, in each of its rounds."""

from dataclasses import replace

import torch

from fedsim.clients.budget.plan import Draft, PrivacyPlanError, check_draws
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.updates.ballots import Ballots
from fedsim.clients.updates.mechanism import UpdateMechanism
from fedsim.clients.updates.votes import VoteMechanism


def draft_of_updates(
    privacy: PrivacySettings,
    rounds: int,
    parameters: FlatParameters | None,
    drawn: float | None,
) -> Draft:
    """Return the draft of a client that releases its whole update.

    Args:
        privacy: the `privacy` section.
        rounds: that the client is scheduled for.
        parameters: of the model; None: not known.
        drawn: probability with which the client is in each round, where that is secret.
    """
    rate, clipping = 1.0 if drawn is None else drawn, privacy.clipping
    count_noise = clipping.count_noise if clipping.name == "adaptive" else None

    def build(noise: float) -> UpdateMechanism:
        try:
            update = UpdateMechanism(
                privacy.clip_norm,
                noise,
                count_noise=count_noise,
                participation_rate=rate,
            )
            if parameters is not None:
                check_draws(rounds * (parameters.size + 1))
                update = update.for_model(parameters.size, parameters.tensors[0].dtype)
                if privacy.noise_multiplier is None:
                    update = update.with_effective_noise(noise)
        except ValueError as error:
            raise PrivacyPlanError(f"the release of a client's update fails: {error}") from error
        return update

    return Draft(
        public_size=1,
        examples=0,
        steps=rounds,
        given=privacy.noise_multiplier,
        like=UpdateMechanism(1.0, 1.0, participation_rate=rate),
        build=build,
        charges_itself=drawn is None,
    )


def draft_of_votes(
    privacy: PrivacySettings, ballots: Ballots, rounds: int, counts: int | None
) -> Draft:
    """Return the draft of a client that votes in every round.

    Args:
        privacy: the `privacy` section, with the unit client.
        ballots: sizes and noise of the ballots.
        rounds: number of ballots.
        counts: counts of a ballot, queries · classes; None: not known, and nothing is checked.
    """
    like = VoteMechanism(1.0, 1.0, ballots=ballots)

    def build(noise: float) -> VoteMechanism:
        if noise == 0.0:
            raise PrivacyPlanError(
                "privacy.noise_multiplier 0 adds no noise to any vote; use privacy: null for votes "
                "without privacy"
            )
        release = replace(like, noise_multiplier=noise)
        if counts is None:
            return release
        check_draws(rounds * counts)
        try:
            return release.for_model(counts, torch.float64)
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

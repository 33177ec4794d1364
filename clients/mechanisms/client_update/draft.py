"""The draft of a client that releases its whole update in each of its rounds."""

from fedsim.clients.mechanisms.client_update.mechanism import UpdateMechanism
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, PrivacyPlanError, check_draws


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client that releases its whole update.

    Args:
        request: its settings, its schedule and its model; its data and `local` say nothing.
    """
    privacy, rounds, parameters = request.privacy, request.planned_rounds, request.parameters
    rate, clipping = 1.0 if request.drawn is None else request.drawn, privacy.clipping
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
                update = update.for_model(parameters)
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
        charges_itself=request.drawn is None,
    )

"""Estimated ε of the audited clients of a federation, for each view of its run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedsim.audit.views import UploadLaw, Views, estimate_views, noise_of_rounds
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.federation.federation import Federation


def views_of(federation: Federation, laws: Mapping[int, UploadLaw | None]) -> dict[int, Views]:
    """Return the estimates of every audited client with a measured law.

    Noise of a client that was not audited is scaled from its charged noise, by the mean ratio of
    the audited ones: all clients have the same optimizer.

    There is no estimate for the final model of a server optimizer or an average: it is NaN.

    Args:
        federation: with plans.
        laws: law of the uploads, by client.
    """
    known = {client: law for client, law in laws.items() if law is not None}
    plans = federation.plans
    if plans is None or not known:
        return {}
    weights = [float(weight) for weight in federation.weights.values]
    own_rounds = [_rounds(federation, client, plan) for client, plan in enumerate(plans)]
    rounds = noise_of_rounds(
        _participants(own_rounds, federation.participation.rounds),
        _noise(federation, plans, known),
        weights,
    )
    views = {
        client: estimate_views(
            law,
            [number - 1 for number in own_rounds[client]],
            weights[client],
            rounds,
            delta=plans[client].delta,
        )
        for client, law in known.items()
    }
    if _is_sum_of_rounds(federation):
        return views
    return {client: replace(one, final_model=math.nan) for client, one in views.items()}


def _is_sum_of_rounds(federation: Federation) -> bool:
    """Whether the final model is the sum of all rounds' mean updates, as its estimate takes it."""
    settings = federation.experiment.federation
    return settings.algorithm.name == "fedavg" and settings.server_averaging is None


def _rounds(federation: Federation, client: int, plan: PrivacyPlan) -> tuple[int, ...]:
    """Return the rounds that a client's budget affords."""
    count = federation.steps.rounds_in(client, plan.steps_to_take)
    return federation.participation.rounds_of(client)[:count]


def _participants(own_rounds: Sequence[Sequence[int]], rounds: int) -> Iterator[list[int]]:
    """Yield the participants of each round."""
    found: list[list[int]] = [[] for _ in range(rounds)]
    for client, numbers in enumerate(own_rounds):
        for number in numbers:
            found[number - 1].append(client)
    yield from found


def _noise(
    federation: Federation, plans: Sequence[PrivacyPlan], known: Mapping[int, UploadLaw]
) -> dict[int, float]:
    """Return the variance of the noise of every client's upload."""
    terms = federation.client_privacy or ()
    charged = [
        (release.noise_multiplier * own.privacy.clip_norm / release.expected_lot) ** 2
        for plan, own in zip(plans, terms, strict=True)
        for release in (plan.release_as(DpSgdMechanism),)
    ]
    ratio = float(np.mean([law.noise / charged[client] for client, law in known.items()]))
    measured = {client: law.noise for client, law in known.items()}
    return {client: ratio * variance for client, variance in enumerate(charged)} | measured

"""Noise of an aggregate: the noise that each party adds, and the expected L2 norm of the total.

With distributed trust, each client adds an equal share of the noise. The shares are so large that
even a sum of the fewest clients allowed protects each of them as its budget requires. With central
trust, the server adds all noise, as much as the client with the largest need requires.
`NoiseShares` computes the noise in both cases.

The norm of the noise that was drawn is never published, since it would reveal something about the
examples. The expected norm follows from the public plan. It is close to the norm of d drawn values
if d is large, as their squared norm has a relative standard deviation of √(2 / d).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fedsim.accountant.trust import NoiseNeed, NoiseShares
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.contract import SummedMechanism, SumPart
from fedsim.clients.mechanisms.plan import (
    Accounting,
    PrivacyBudgetError,
    PrivacyPlan,
    PrivacyPlanError,
)
from fedsim.clients.mechanisms.planner import noise_of_release, within_budget
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import ExperimentWithClients
from fedsim.federation.schedule import ClientPrivacy, map_shared, participation_of
from fedsim.noise.sources import DEVIATION, MAX_DRAW
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, SumPlan, whole_bound
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.round_parts import ExpectedNoise


def sum_scale(client_privacy: ClientPrivacy, plan: PrivacyPlan, weight: int, lr: float) -> float:
    """Return the largest change of a client's weighted update by one privacy unit, as an L2 norm.

    A unit is one example, or all data of the client. The result is a_k C_k, where C_k is the
    clipping norm of client k, and the sum multiplies the client's update by a_k.

    Args:
        client_privacy: the client's privacy settings.
        plan: the client's privacy plan.
        weight: the client's weight.
        lr: the learning rate of the single local step; unused where the privacy unit is the client.
    """
    clip_norm = client_privacy.privacy.max_grad_norm or 0.0
    return summed(plan).sum_scale(weight, lr=lr, clip_norm=clip_norm)


def summed(plan: PrivacyPlan) -> SummedMechanism:
    """Return a plan's mechanism, as one whose noisy releases can be added up over clients.

    Raises:
        TypeError: releases of this mechanism cannot be added up.
    """
    if not isinstance(plan.release, SummedMechanism):
        raise TypeError(f"a release of {type(plan.release).__name__} is no part of a sum")
    return plan.release


def share_noise(
    experiment: ExperimentWithClients,
    client_privacy: Sequence[ClientPrivacy],
    plans: Sequence[PrivacyPlan],
    weights: ClientWeights,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[PrivacyPlan, ...], SumPlan]:
    """Divide the noise of a sum among its clients; return the clients' plans and the sum's plan.

    Guarantee: every sum has at least `min_clients` clients, of which at most `colluding_clients`
    add no noise. The other clients of the sum together add at least the noise that each plan in
    `plans` needs. The budget of each client is measured by the noise that the sum then has.

    Args:
        experiment: an experiment with distributed or central trust.
        client_privacy: the privacy settings of each client.
        plans: the plan of each client, made as if no other client added noise.
        weights: the weights of all clients, computed from these plans.
        shapes: the shape of each trained tensor of the model, by name.

    Raises:
        PrivacyPlanError: no honest client would be left, or the sum has no noise.
    """
    privacy = experiment.privacy
    if privacy is None or privacy.trust.name == "local":
        raise ValueError("local trust has no noisy sums")
    distributed = privacy.trust.name == "distributed"
    scale_of = partial(sum_scale, lr=experiment.local.optimizer.lr)
    scales = [*map_shared(scale_of, client_privacy, plans, weights.values)]
    needs = [*map_shared(_need, scales, client_privacy, plans)]
    secure = experiment.secure_aggregation if distributed else None
    shares = _shares_for(needs, privacy, 1 if secure is None else secure.min_clients)
    part = SumPart(shares.honest, adds_noise=distributed)

    def with_part(scale: float, terms: ClientPrivacy, plan: PrivacyPlan) -> PrivacyPlan:
        if not scale:
            return plan
        share = summed(plan).with_share(shares.own_multiplier(scale), shares.honest)
        return within_budget(replace(plan, release=share, part=part), terms.privacy)

    shared = tuple(map_shared(with_part, scales, client_privacy, plans))
    parts = [plan for plan in shared if plan.part is not None]
    sums = SumPlan(
        unit=-shares.share / DEVIATION,  # a step goes against the gradient
        bound=max(summed(plan).largest_integer for plan in parts)
        + (MAX_DRAW if distributed else 0),
        shapes=shapes,
        server_noise=not distributed,
        divisor=_public_divisor(experiment, weights),
    )
    return shared, summed(parts[0]).of_sum(sums)


def _shares_for(
    needs: Sequence[NoiseNeed], privacy: PrivacySettings, min_clients: int
) -> NoiseShares:
    """Return the noise that each client adds to a sum of at least `min_clients` clients.

    Raises:
        PrivacyPlanError: no honest client would be left, or the sum has no noise.
    """
    colluding = privacy.trust.colluding_clients
    try:
        shares = NoiseShares.meeting(needs, min_clients=min_clients, colluding_clients=colluding)
    except ValueError as error:
        raise PrivacyPlanError(f"privacy.trust.colluding_clients cannot be met: {error}") from error
    if shares.share == 0.0:
        raise PrivacyPlanError(
            f"privacy.trust: {privacy.trust.name} needs noise, and no client has any: set "
            "target_epsilon, or a noise_multiplier above 0"
        )
    return shares


def _public_divisor(experiment: ExperimentWithClients, weights: ClientWeights) -> float | None:
    """Return the expected sum of weights of a round, if the noise is divided by it in all rounds.

    That is so where nobody may learn who takes part, and where the noise of rounds cancels.
    """
    participation, privacy = participation_of(experiment), experiment.privacy
    rate = participation.secret_rate
    if privacy is not None and privacy.is_correlated:
        rate = participation.rate
    return None if rate is None else rate * sum(weights.values)


def _need(scale: float, terms: ClientPrivacy, plan: PrivacyPlan) -> NoiseNeed:
    return NoiseNeed(scale, summed(plan).value_noise, _against_server(terms, plan))


def _against_server(terms: ClientPrivacy, plan: PrivacyPlan) -> float:
    """Return the noise multiplier that meets `fallback_epsilon`, or 0 where it is not set."""
    limit = terms.privacy.trust.fallback_epsilon
    if limit is None or not plan.planned_steps:
        return 0.0
    try:
        wanted = noise_of_release(
            summed(plan).against_server(),
            plan.planned_steps,
            target_epsilon=limit,
            accounting=Accounting.of(terms.privacy, plan.delta),
        )
    except ValueError as error:
        raise PrivacyBudgetError(
            f"privacy.trust.fallback_epsilon cannot be met: {error}"
        ) from error
    return plan.release.with_effective_noise(wanted).noise_multiplier


def sum_noise(sums: SumPlan, weights: Sequence[int], clip_norm: float, size: int) -> ExpectedNoise:
    """Return the expected noise in a round's average update if it comes from a noisy sum.

    The norm is None if the updates are divided by a sum of weights that is 0. Whatever its number
    of steps, a participant adds one release to the sum.

    Guarantee: where the divisor of the sum is public, the norm does not depend on which clients
    took part.

    Args:
        sums: the plan of the noisy sums.
        weights: the weight of each client's update.
        clip_norm: the clip norm of the first round; used only if the clip norm is adaptive.
        size: the number of trained values of the model.
    """

    def norm(
        steps: Mapping[int, int], clip_norms: Mapping[int, AdaptiveClipNorm], round_number: int
    ) -> float | None:
        members = [client for client in steps if weights[client]]
        divisor = sums.divisor
        if divisor is None:
            divisor = float(sum(weights[client] for client in members))
        if not divisor:
            return None
        draws = 1 if sums.server_noise else len(members)
        bound = 1.0
        if sums.count_unit is not None:  # the unit is the length at S = 1
            bound = whole_bound(clip_norms.get(0, clip_norm))
        deviation = abs(sums.unit) * DEVIATION * bound * math.sqrt(draws)
        return deviation * math.sqrt(size) / divisor

    return norm


@dataclass(frozen=True)
class ClientNoise:
    """The expected noise in a round's average update if each client adds its own noise.

    The noise of a DP-SGD step moves the model by the round's learning rate times the noise. The
    noise also changes the gradients of later steps of the round; this second-order effect is
    ignored. With momentum, Adam or correlated noise, the noise of several steps adds up in another
    way, and the norm is None.

    Attributes:
        plans: the privacy plan of each client.
        weights: the weight of each client.
        parameters: the trained parameters of the model.
        local: the settings of local training.
    """

    plans: Sequence[PrivacyPlan]
    weights: Sequence[int]
    parameters: FlatParameters
    local: LocalSettings

    @cached_property
    def _variances(self) -> list[float | None]:
        """The expected squared L2 norm of what the noise of one release adds to the update."""
        optimizer = self.local.optimizer
        is_plain = isinstance(optimizer, SgdSettings) and not optimizer.momentum
        lr = optimizer.lr if is_plain else None
        return [
            plan.release.release_variance(self.parameters, lr, plan.round_steps)
            for plan in self.plans
        ]

    @cached_property
    def _bounds(self) -> list[float]:
        """The first adaptive clip norm of each client; 0 where it is fixed."""
        return [whole_bound(plan.release.adapted_clip_norm or 0.0) for plan in self.plans]

    def __call__(
        self,
        steps: Mapping[int, int],
        clip_norms: Mapping[int, AdaptiveClipNorm],
        round_number: int,
    ) -> float | None:
        """Return the expected L2 norm of the noise in a round's average update."""
        divisor = sum(self.weights[client] for client in steps)
        terms = []
        for client, taken in steps.items():
            variance, bound = self._variances[client], self._bounds[client]
            if variance is None:
                return None
            scale = whole_bound(clip_norms.get(client, bound)) / bound if bound else 1.0
            terms.append(taken * variance * (self.weights[client] * scale) ** 2)
        if not divisor:
            return None
        length = math.sqrt(math.fsum(terms)) / divisor
        local = self.local
        if local.lr_schedule is None or any(plan.release.protects_client for plan in self.plans):
            return length
        return length * local.learning_rate(round_number) / local.optimizer.lr

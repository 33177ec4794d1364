"""Plans of clients whose releases are parts of noisy sums: one grid and one noise for all.

Distributed trust: each client adds an equal share, so that the smallest sum that may be opened
protects every client as its budget asks. Central trust: the server adds the noise that the client
with the largest need asks for. Both are `NoiseShares`, with one honest draw in the second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedsim.accountant.trust import NoiseNeed, NoiseShares
from fedsim.clients.mechanisms.budget import noise_of_release
from fedsim.clients.mechanisms.client_privacy import ClientPrivacy
from fedsim.clients.mechanisms.contract import SummedMechanism, SumPart
from fedsim.clients.mechanisms.plan import PrivacyBudgetError, PrivacyPlan, PrivacyPlanError
from fedsim.core.shared_values import map_shared
from fedsim.experiment import Experiment
from fedsim.federation.schedule import participation_of
from fedsim.noise.grid import DEVIATION, MAX_DRAW
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import ClientWeights


def sum_scale(own: ClientPrivacy, plan: PrivacyPlan, weight: int, lr: float) -> float:
    """Return a_k C_k: by how much one unit of a client moves its weighted update at most.

    Args:
        own: the client's privacy settings.
        plan: its plan.
        weight: its weight.
        lr: learning rate of the one local step; it says nothing where the unit is the client.
    """
    clip_norm = own.privacy.max_grad_norm or 0.0
    return summed(plan).sum_scale(weight, lr=lr, clip_norm=clip_norm)


def summed(plan: PrivacyPlan) -> SummedMechanism:
    """Return the release of a plan, which may be a part of a sum.

    Raises:
        TypeError: it may not.
    """
    if not isinstance(plan.release, SummedMechanism):
        raise TypeError(f"a release of {type(plan.release).__name__} is no part of a sum")
    return plan.release


def share_noise(
    experiment: Experiment,
    client_privacy: Sequence[ClientPrivacy],
    plans: Sequence[PrivacyPlan],
    weights: ClientWeights,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[PrivacyPlan, ...], SumPlan]:
    """Return the plans of all clients with their parts of a sum, and the plan of the sum.

    Guarantee: whichever `min_clients` clients are in a sum, of which `colluding_clients` add no
    noise, the noise of the others is at least what each client's own plan needs.

    Args:
        experiment: with distributed or central trust.
        client_privacy: privacy settings of each client.
        plans: the plan of each client as if it added all noise of its claim alone.
        weights: the weights of all clients, from these plans.
        shapes: shape of each trained tensor of the model by name.

    Raises:
        PrivacyPlanError: no honest client would be left, or the sum has no noise.
    """
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    if privacy is None or privacy.trust.name == "local":
        raise ValueError("local trust has no noisy sums")
    distributed = privacy.trust.name == "distributed"
    scale_of = partial(sum_scale, lr=experiment.local.optimizer.lr)
    scales = [*map_shared(scale_of, client_privacy, plans, weights.values)]
    needs = [*map_shared(_need, scales, client_privacy, plans)]
    try:
        shares = NoiseShares.meeting(
            needs,
            min_clients=secure.min_clients if distributed and secure is not None else 1,
            colluding_clients=privacy.trust.colluding_clients,
        )
    except ValueError as error:
        raise PrivacyPlanError(f"privacy.trust.colluding_clients cannot be met: {error}") from error
    if shares.share == 0.0:
        raise PrivacyPlanError(
            f"privacy.trust: {privacy.trust.name} needs noise, and no client has any: set "
            "target_epsilon, or a noise_multiplier above 0"
        )
    part = SumPart(shares.honest, adds_noise=distributed)

    def with_part(scale: float, plan: PrivacyPlan) -> PrivacyPlan:
        if not scale:
            return plan
        share = summed(plan).with_share(shares.own_multiplier(scale), shares.honest)
        return replace(plan, release=share, part=part)

    shared = tuple(map_shared(with_part, scales, plans))
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


def _public_divisor(experiment: Experiment, weights: ClientWeights) -> float | None:
    """Return the expected sum of weights of a round, where nobody may learn who takes part."""
    rate = participation_of(experiment, len(weights.values)).secret_rate
    return None if rate is None else rate * sum(weights.values)


def _need(scale: float, own: ClientPrivacy, plan: PrivacyPlan) -> NoiseNeed:
    return NoiseNeed(scale, summed(plan).value_noise, _against_server(own, plan))


def _against_server(own: ClientPrivacy, plan: PrivacyPlan) -> float:
    """Return the noise multiplier that `fallback_epsilon` asks for; 0 without it."""
    limit = own.privacy.trust.fallback_epsilon
    if limit is None or not plan.planned_steps:
        return 0.0
    try:
        wanted = noise_of_release(
            summed(plan).against_server(),
            plan.planned_steps,
            target_epsilon=limit,
            delta=plan.delta,
            accountant=own.privacy.accounting,
            adjacency=own.privacy.adjacency.name,
        )
    except ValueError as error:
        raise PrivacyBudgetError(
            f"privacy.trust.fallback_epsilon cannot be met: {error}"
        ) from error
    return plan.release.with_effective_noise(wanted).noise_multiplier

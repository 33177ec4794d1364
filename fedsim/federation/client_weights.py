"""Weights of all clients of an experiment, from the public values of their plans."""

from collections.abc import Sequence

from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.shared_values import map_shared
from fedsim.experiment import Experiment
from fedsim.federation.schedule import participation_of
from fedsim.server.aggregation.weights import (
    WEIGHT_UNITS,
    ClientWeights,
    PlanValues,
    plan_weights,
    uniform_weights,
)


def client_weights(
    experiment: Experiment,
    sizes: Sequence[int],
    plans: Sequence[PrivacyPlan] | None,
    *,
    takes_weights: bool,
) -> ClientWeights:
    """Return the weights of all clients.

    A client that leaves when its budget is spent keeps its weight until then.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.
        plans: privacy plan of each client; None without privacy.
        takes_weights: whether the strategy weighs clients; where not, all have the same weight.

    Raises:
        WeightingError: some clients add noise and others none, or no weights keep `max_share`.
    """
    if not takes_weights:
        return uniform_weights(len(sizes))
    secure, units = experiment.secure_aggregation, WEIGHT_UNITS
    if secure is not None and secure.encoding.max_weight != "auto":
        units = min(units, secure.encoding.max_weight)
    values = [*map_shared(PlanValues, sizes)]
    if plans is not None:
        # Where the unit is the client, its size is private, and no weight depends on it.
        values = [*map_shared(_values, plans)]
    return plan_weights(
        experiment.federation.weights,
        values,
        clients_per_round=participation_of(experiment, len(sizes)).round_sizes[0],
        units=units,
    )


def ignored_weighting(experiment: Experiment, weights: ClientWeights) -> str | None:
    """Return a line where the strategy ignores `federation.weighting`; None where it does not.

    Args:
        experiment: the settings.
        weights: the weights of the federation.
    """
    federation = experiment.federation
    if federation.weights.is_uniform or weights.name == federation.weights.name:
        return None
    return (
        f"federation.weighting: {federation.weights.name} is ignored, as the strategy "
        f"{federation.algorithm.name} takes no weights"
    )


def _values(plan: PrivacyPlan) -> PlanValues:
    return PlanValues(1 if plan.release.protects_client else plan.examples, _noise(plan))


def _noise(plan: PrivacyPlan) -> float:
    """Return z / q: the noise in a sum over all examples that a step of rate q estimates."""
    return plan.release.noise_multiplier / plan.release.sampling_rate

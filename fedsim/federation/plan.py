"""The plan of a federation: the participation, steps, noise and weights of its clients.

The plan follows from settings, public client sizes and the seed, before the first round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.mechanisms.client_privacy import ClientPrivacy, resolve_client_privacy
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.data import FederatedData
from fedsim.experiment import ExperimentWithClients
from fedsim.federation.aggregate_noise import share_noise
from fedsim.federation.client_plans import (
    client_plans,
    client_weights,
    largest_update,
    plan_digest,
    read_client_tables,
)
from fedsim.federation.release_problem import problem_of
from fedsim.federation.schedule import StepSchedule, participation_of
from fedsim.federation.trained_model import FederationModel, release_parameters
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.participation.participation import Participation


@dataclass(frozen=True)
class FederationPlan:
    """The public plan of a federation, fixed before its first round.

    Attributes:
        steps: the schedule of the clients' steps in each round.
        client_privacy: the privacy settings of each client; None without privacy.
        clients: the privacy plan of each client; None without privacy.
        weights: the weights of all clients' updates.
        sums: the plan of noisy sums; None with local trust.
        largest_update: a bound on each value of the updates that secure aggregation encodes; None
            if none is known.
        digest: the digest of all public facts that fix the clients' releases; "" without privacy.
    """

    steps: StepSchedule
    client_privacy: tuple[ClientPrivacy, ...] | None
    clients: tuple[PrivacyPlan, ...] | None
    weights: ClientWeights
    sums: SumPlan | None = None
    largest_update: float | None = None
    digest: str = ""

    @property
    def participation(self) -> Participation:
        """The rule that chooses the clients of each round, in public or in secret."""
        return self.steps.participation


def schedule_of(
    experiment: ExperimentWithClients, base: Path, sizes: Sequence[int]
) -> tuple[tuple[ClientPrivacy, ...] | None, StepSchedule]:
    """Return each client's privacy settings (None without privacy), and the schedule of steps.

    Args:
        experiment: the settings.
        base: the directory in which relative paths start.
        sizes: number of examples of each client.

    Raises:
        ValueError: a table of clients does not fit the experiment, or there are too many steps.
    """
    terms, participation = None, participation_of(experiment)
    if experiment.privacy is not None:
        terms = resolve_client_privacy(
            experiment.privacy,
            num_clients=len(sizes),
            seed=experiment.seed,
            tables=read_client_tables(experiment.privacy, base),
            clients_per_round=participation.round_sizes[1],
        )
    return terms, StepSchedule.of(experiment, participation, terms, sizes)


def plan_of(
    experiment: ExperimentWithClients,
    client_privacy: tuple[ClientPrivacy, ...] | None,
    data: FederatedData,
    steps: StepSchedule,
    model: FederationModel,
    algorithm: Algorithm,
) -> FederationPlan:
    """Return the plan of a federation.

    First each client's noise is planned as if no other party added noise. The weights of updates
    follow from these plans. With a noisy sum, plans and weights give each client's share of noise.

    Args:
        experiment: the settings.
        client_privacy: the privacy settings of each client; None without privacy.
        data: the examples, of which the clients' public sizes are used.
        steps: the planned steps.
        model: the initial model, with what is needed to train it.
        algorithm: the federated algorithm.

    Raises:
        ValueError: no noise meets the settings; the message names the setting and the fix.
    """
    plans, largest, sizes = None, None, data.clients.sizes
    if client_privacy is not None:
        parameters = release_parameters(experiment, model)
        problem = problem_of(experiment, model.shared.model, data, algorithm)
        plans = client_plans(experiment, client_privacy, sizes, steps, parameters, problem)
        if experiment.secure_aggregation is not None:
            largest = largest_update(experiment, plans, parameters.size, algorithm)
    weights = client_weights(experiment, sizes, plans, takes_weights=algorithm.takes_weights)
    sums, privacy = None, experiment.privacy
    if privacy is not None and privacy.trust.name != "local" and client_privacy and plans:
        shapes = model.shared.trained_shapes
        plans, sums = share_noise(experiment, client_privacy, plans, weights, shapes)
    digest = plan_digest(experiment, plans, weights, sums, largest)
    return FederationPlan(steps, client_privacy, plans, weights, sums, largest, digest)

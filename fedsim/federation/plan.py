"""The plan of a federation: the participation, steps, noise and weights of its clients.

The plan follows from settings, public client sizes and the seed, before the first round. Some
mechanisms need facts about model and data besides: output perturbation a convex training problem,
input perturbation bounds on examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord
from torch import nn

from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, LossName
from fedsim.clients.mechanisms.output_perturbation import ConvexProblem
from fedsim.clients.mechanisms.plan import PrivacyPlan, PrivacyPlanError
from fedsim.clients.privacy_settings import BoundedExamplesSettings
from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.aggregate_noise import share_noise
from fedsim.federation.client_plans import (
    client_plans,
    client_weights,
    largest_update,
    plan_digest,
    read_client_tables,
)
from fedsim.federation.schedule import (
    ClientPrivacy,
    StepSchedule,
    Table,
    participation_of,
    resolve_client_privacy,
)
from fedsim.federation.trained_model import FederationModel, release_parameters
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.participation.participation import Participation

if TYPE_CHECKING:
    from fedsim.pate.teachers import Teachers


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
    experiment: ExperimentWithClients,
    base: Path,
    sizes: Sequence[int],
    *,
    tables: Mapping[str, Table] | None = None,
) -> tuple[tuple[ClientPrivacy, ...] | None, StepSchedule]:
    """Return each client's privacy settings (None without privacy), and the schedule of steps.

    Args:
        experiment: the settings.
        base: the directory in which relative paths start.
        sizes: number of examples of each client.
        tables: the content of the tables that `privacy.clients` names; None reads their files.

    Raises:
        ValueError: a table of clients does not fit the experiment, or there are too many steps.
    """
    terms, participation = None, participation_of(experiment)
    if experiment.privacy is not None:
        if tables is None:
            tables = read_client_tables(experiment.privacy, base)
        terms = resolve_client_privacy(
            experiment.privacy,
            num_clients=len(sizes),
            seed=experiment.seed,
            tables=tables,
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
        problem = problem_of(experiment, model.shared.model, data)
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


def problem_of(experiment: Experiment, model: nn.Module, data: FederatedData) -> object:
    """Return the facts about model and data that an experiment's privacy plans need.

    These are the convex problem for output perturbation, and bounds on examples for input
    perturbation. Other mechanisms need nothing, and the result is None.

    Args:
        experiment: the settings.
        model: the initial model.
        data: the examples, of which the public test set shows the shapes.

    Raises:
        PrivacyPlanError: output perturbation is used with another model than one linear layer, or
            examples or targets have no bound.
    """
    find = _PROBLEMS.get(experiment.release_kind.name)
    return None if find is None else find(experiment, model, data)


def _convex_problem(experiment: Experiment, model: nn.Module, data: FederatedData) -> ConvexProblem:
    layer = _linear_layer(model)
    bounds = _bounded_examples(experiment, model, data, targets=layer.out_features)
    return ConvexProblem(bounds, bias=layer.bias is not None)


def _bounded_examples(
    experiment: Experiment,
    model: nn.Module,
    data: FederatedData,
    *,
    targets: int | None = None,
) -> BoundedExamples:
    settings = None if experiment.privacy is None else experiment.privacy.mechanism
    if not isinstance(settings, BoundedExamplesSettings):
        raise TypeError(f"the mechanism has no bounds of examples: {settings!r}")
    if not np.issubdtype(data.test.features.dtype, np.floating):
        raise PrivacyPlanError(
            f"privacy.mechanism: {settings.name} needs features that are numbers of a bounded "
            f"norm, got {data.test.features.dtype}; use mechanism: {GRADIENT_PERTURBATION}"
        )
    return BoundedExamples(
        loss=cast(LossName, experiment.model.loss),
        features=prod(data.input_shape),
        targets=_num_targets(experiment.model.loss, data) if targets is None else targets,
        max_feature_norm=settings.max_feature_norm,
        max_target_norm=settings.max_target_norm,
    )


_PROBLEMS: Mapping[str, Callable[[Experiment, nn.Module, FederatedData], object]] = {
    "output_perturbation": _convex_problem,
    "input_perturbation": _bounded_examples,
}


def _num_targets(loss: str, data: FederatedData) -> int:
    """Return the number of classes, or the number of values of a regression target.

    Raises:
        PrivacyPlanError: an example has several classes.
    """
    shape = data.test.targets.shape[1:]
    if loss != "cross_entropy":
        return prod(shape)
    if shape or data.num_classes is None:
        raise PrivacyPlanError(
            "privacy.mechanism needs one class for each example, got targets of shape "
            f"{tuple(shape)}; use mechanism: {GRADIENT_PERTURBATION}"
        )
    return data.num_classes


def _linear_layer(model: nn.Module) -> nn.Linear:
    """Return the single layer of a linear model.

    Raises:
        PrivacyPlanError: the model is not one trained linear layer.
    """
    layers = [*model] if type(model) is nn.Sequential else [model]
    if layers and type(layers[0]) is nn.Flatten:
        layers = layers[1:]
    is_linear = len(layers) == 1 and type(layers[0]) is nn.Linear
    if not is_linear or not all(parameter.requires_grad for parameter in model.parameters()):
        raise PrivacyPlanError(
            "privacy.mechanism: output_perturbation has a proven sensitivity for one linear layer, "
            f"trained as a whole, and the model is {type(model).__name__} of "
            f"{', '.join(type(layer).__name__ for layer in layers) or 'nothing'}; use model: "
            f"{{name: logistic}}, or mechanism: {GRADIENT_PERTURBATION}"
        )
    return cast(nn.Linear, layers[0])


class Goal:
    """The work of a federation's clients: in this base class, to train one model together.

    Attributes:
        averages: whether the server averages the clients' uploads into a model.
    """

    averages = True

    @property
    def public_queries(self) -> Examples | None:
        """The public examples on which clients vote; None if clients train a model."""
        return None

    @property
    def voter(self) -> "Teachers | None":
        """The teacher models of this process's clients, which vote; None if clients train."""
        return None

    def algorithm(self) -> Algorithm | None:
        """Return the federated algorithm of this goal; None if the experiment chooses it."""
        return None

    def digest(self, conditions: str) -> str:
        """Return the digest of all settings and data that must stay the same in a run.

        Args:
            conditions: the digest of what all goals have in common.
        """
        return conditions

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model for the server's arrays: these arrays, or the student model."""
        return arrays

    def counts(self, arrays: ArrayRecord) -> dict[str, float]:
        """Return numbers by name that a round reports in addition to a model's metrics."""
        return {}

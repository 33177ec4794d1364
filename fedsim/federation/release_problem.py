"""Facts about model and data that some privacy plans need besides the settings.

Output perturbation needs a convex training problem, input perturbation needs bounds on examples.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import cast

import numpy as np
from torch import nn

from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, LossName
from fedsim.clients.mechanisms.output_perturbation import ConvexProblem
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.clients.privacy_settings import BoundedExamplesSettings
from fedsim.data import FederatedData
from fedsim.experiment import Experiment


def problem_of(
    experiment: Experiment, model: nn.Module, data: FederatedData, algorithm: Algorithm
) -> object:
    """Return the facts about model and data that an experiment's privacy plans need.

    These are the convex problem for output perturbation, and bounds on examples for input
    perturbation. Other mechanisms need nothing, and the result is None.

    Args:
        experiment: the settings.
        model: the initial model.
        data: the examples, of which the public test set shows the shapes.
        algorithm: the federated algorithm.

    Raises:
        PrivacyPlanError: output perturbation is used with another model than one linear layer, or
            with an algorithm that changes local steps; or examples or targets have no bound.
    """
    find = _PROBLEMS.get(experiment.release_kind.name)
    return None if find is None else find(experiment, model, data, algorithm)


def _convex_problem(
    experiment: Experiment, model: nn.Module, data: FederatedData, algorithm: Algorithm
) -> ConvexProblem:
    layer = _linear_layer(model)
    if algorithm.client() is not None:
        name = experiment.federation.algorithm.name
        raise PrivacyPlanError(
            "privacy.mechanism: output_perturbation has a proof for plain gradient descent alone, "
            f"and strategy {name} changes local steps; use fedavg, or mechanism: "
            f"{GRADIENT_PERTURBATION}"
        )
    bounds = _bounded_examples(experiment, model, data, algorithm, targets=layer.out_features)
    return ConvexProblem(bounds, bias=layer.bias is not None)


def _bounded_examples(
    experiment: Experiment,
    model: nn.Module,
    data: FederatedData,
    algorithm: Algorithm,
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


_PROBLEMS: Mapping[str, Callable[[Experiment, nn.Module, FederatedData, Algorithm], object]] = {
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

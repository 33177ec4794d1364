"""The bounds of examples, and the convex problem, of noise that is not on gradients."""

from math import prod
from typing import cast

import numpy as np
from torch import nn

from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.losses import LossName
from fedsim.clients.mechanisms.output_perturbation.problem import ConvexProblem
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.data import FederatedData
from fedsim.experiment import Experiment


def perturbed_problem(
    experiment: Experiment, model: nn.Module, data: FederatedData, algorithm: Algorithm
) -> ConvexProblem | BoundedExamples | None:
    """Return what the sensitivity of an experiment follows from; None for noise on gradients.

    Args:
        experiment: the settings.
        model: the initial model.
        data: the examples, of which the public test set shows the shapes.
        algorithm: that of the federation.

    Raises:
        PrivacyPlanError: perturbation output with another model than one linear layer or with an
            algorithm that changes local steps, or targets without a bound.
    """
    privacy = experiment.privacy
    if privacy is None or privacy.perturbation == "gradient":
        return None
    if not np.issubdtype(data.test.features.dtype, np.floating):
        raise PrivacyPlanError(
            f"privacy.perturbation: {privacy.perturbation} needs features that are numbers of a "
            f"bounded norm, got {data.test.features.dtype}; use perturbation: gradient"
        )
    layer = None
    if privacy.perturbation == "output":
        layer = _linear_layer(model)
        if algorithm.client() is not None:
            name = experiment.federation.algorithm.name
            raise PrivacyPlanError(
                "privacy.perturbation: output has a proof for plain gradient descent alone, and "
                f"strategy {name} changes local steps; use fedavg, or perturbation: gradient"
            )
    bounds = BoundedExamples(
        loss=cast(LossName, experiment.model.loss),
        features=prod(data.input_shape),
        targets=_num_targets(experiment.model.loss, data) if layer is None else layer.out_features,
        max_feature_norm=privacy.max_feature_norm or 0.0,
        max_target_norm=privacy.max_target_norm,
    )
    if layer is None:
        return bounds
    return ConvexProblem(bounds, bias=layer.bias is not None)


def _num_targets(loss: str, data: FederatedData) -> int:
    """Return the number of classes, or of values of a target.

    Raises:
        PrivacyPlanError: an example has several classes.
    """
    shape = data.test.targets.shape[1:]
    if loss != "cross_entropy":
        return prod(shape)
    if shape or data.num_classes is None:
        raise PrivacyPlanError(
            "privacy.perturbation needs one class for each example, got targets of shape "
            f"{tuple(shape)}; use perturbation: gradient"
        )
    return data.num_classes


def _linear_layer(model: nn.Module) -> nn.Linear:
    """Return the only layer of a linear model.

    Raises:
        PrivacyPlanError: the model is another one.
    """
    layers = [*model] if type(model) is nn.Sequential else [model]
    if layers and type(layers[0]) is nn.Flatten:
        layers = layers[1:]
    is_linear = len(layers) == 1 and type(layers[0]) is nn.Linear
    if not is_linear or not all(parameter.requires_grad for parameter in model.parameters()):
        raise PrivacyPlanError(
            "privacy.perturbation: output has a proven sensitivity for one linear layer alone, "
            f"trained as a whole, and the model is {type(model).__name__} of "
            f"{', '.join(type(layer).__name__ for layer in layers) or 'nothing'}; use model: "
            "{name: logistic}, or perturbation: gradient"
        )
    return cast(nn.Linear, layers[0])

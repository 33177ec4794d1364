"""The model of a federation: initial values, per-example gradients, and the copy that is trained.

Every process builds the same initial values. All clients of a process train on one copy of the
model, one client after the other. Before round 1 the model is checked on public examples, which are
the first examples of the server's test set. It is never checked on private examples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.clients.gradients.choice import training_gradients
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.zeroth_order.slopes import SharedCoefficients, Slopes
from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment
from fedsim.federation.first_checks import (
    StillParameter,
    parameters_without_effect,
    still_parameters,
)
from fedsim.models.build import build_model
from fedsim.models.local_base import RebuiltModel, local_base
from fedsim.models.tasks import Task

NUM_CHECK_EXAMPLES = 3
"""Public examples that check a model and choose how its per-example gradients are computed."""

NUM_PROBE_EXAMPLES = 64
"""Public examples on which vectorized clients are compared with clients trained alone."""


def initial_model(
    experiment: Experiment, data: FederatedData, task: Task, *, base: Path
) -> nn.Module:
    """Return the initial model of an experiment.

    Args:
        experiment: the settings; their seed determines the weights.
        data: the data, which give the input shape.
        task: the task, which gives the number of outputs.
        base: the directory in which the experiment's relative paths start.

    Guarantee: the weights are the same in every process.
    """
    model = build_model(
        experiment.model,
        input_shape=data.input_shape,
        num_outputs=task.num_outputs,
        seed=experiment.seed,
        base=base,
    )
    local = experiment.local
    if local.zeroth_order is not None:
        rebuilt = RebuiltModel(
            model, local.zeroth_order, seed=experiment.seed, steps=local.given_steps
        )
        rebuilt.attach(model)
    return model


def model_arrays(model: nn.Module) -> ArrayRecord:
    """Return those values of a model that are sent in messages, as a Flower record."""
    return ArrayRecord({name: value.cpu() for name, value in model.state_dict().items()})


def public_examples(data: FederatedData, num_examples: int) -> Examples:
    """Return a copy of the first `num_examples` examples of the public test set, or of all."""
    return data.test.take(np.arange(min(num_examples, len(data.test))))


def to_tensors(examples: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the features (n, ...) and the targets (n, ...) as tensors on a device."""
    features, targets = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
    return features.to(device), targets.to(device)


@dataclass(frozen=True)
class FederationModel:
    """The model of a federation, and what is needed to train and evaluate the model.

    Attributes:
        module: the initial model; rounds overwrite its values.
        shared: the model that all clients of this process train, one client after the other; with
            `task: pate`, the record of the answers to the queries that clients vote on.
        loss: the loss function, which returns one value per example.
        gradients: the method for per-example gradients of the model; None if training uses torch's
            autograd, without privacy.
        task: the kind of prediction (such as classification), which gives targets and metrics.
        device: the device that trains.
        still: the trainable parameters that two test steps on public examples did not change.
    """

    module: nn.Module
    shared: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    task: Task
    device: torch.device
    still: tuple[StillParameter, ...] = ()


def federation_model(
    experiment: Experiment,
    module: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    features: Tensor,
    targets: Tensor,
) -> FederationModel:
    """Return a model with the method for its per-example gradients, and the copy to be trained.

    Args:
        experiment: the settings.
        module: the initial model, on the training device.
        loss: the loss function, which returns one value per example.
        task: the kind of prediction, which gives targets and metrics.
        features: the features of a few public examples (n ≥ 1, ...), on the same device.
        targets: the targets of these examples (n, ...).

    Raises:
        UnsafeModelError: gradients are to be clipped per example, but an example affects the
            gradient of another.
    """
    base, private = local_base(module), experiment.release_kind.draws_batches
    if isinstance(base, RebuiltModel):
        # Padded batches of slopes are checked bit for bit by forward passes (`RowIsolation`).
        gradients = Slopes(module, loss, base.directions)
        shared = SharedCoefficients(gradients, experiment.local.given_steps)
    else:
        gradients = training_gradients(module, loss, features, targets, private=private)
        parameters = None if gradients is None else gradients.parameters
        shared = SharedModel(module, parameters=parameters)
    return FederationModel(module, shared, loss, gradients, task, features.device)


def still_parameters_of(
    model: FederationModel, features: Tensor, targets: Tensor, *, lr: float
) -> tuple[StillParameter, ...]:
    """Return the trainable parameters that two test steps on public examples do not change.

    Args:
        model: the initial model.
        features: the features of public examples (n ≥ 1, ...).
        targets: the targets of these examples (n, ...).
        lr: the largest learning rate.

    Raises:
        ModelError: no parameter changes, so that nothing would be learned.
    """
    if isinstance(model.gradients, Slopes):  # random directions change all parameters
        return parameters_without_effect(model.module, model.loss, features, targets)
    return still_parameters(model.module, model.loss, features, targets, lr=lr)


def release_parameters(experiment: Experiment, model: FederationModel) -> FlatParameters:
    """Return the names and shapes of the values in one release of a client.

    These are the trained parameters. For zeroth-order training they are a step's coefficients.
    """
    if experiment.release_kind.draws_batches and isinstance(model.gradients, Slopes):
        return model.gradients.parameters
    return model.shared.parameters

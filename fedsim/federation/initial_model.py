"""The initial model and the public examples that check it, equal in every process.

Public examples are the first of the server's test set. No model is checked on private examples.
"""

from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment
from fedsim.models.build import build_model
from fedsim.models.metrics import Task
from fedsim.models.rebuilt import RebuiltModel

NUM_CHECK_EXAMPLES = 3
"""Public examples that check a model and choose how its per-example gradients are computed."""

NUM_PROBE_EXAMPLES = 64
"""Public examples on which a cohort is compared with its clients trained alone."""


def initial_model(
    experiment: Experiment, data: FederatedData, task: Task, *, base: Path
) -> nn.Module:
    """Return the initial model.

    Args:
        experiment: the settings; their seed sets the weights.
        data: gives the shape of an input.
        task: gives the number of outputs.
        base: the directory in which the experiment's relative paths start.

    Guarantee: the same weights in every process.
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
    """Return the values of a model that travel, as a record."""
    return ArrayRecord({name: value.cpu() for name, value in model.state_dict().items()})


def public_examples(data: FederatedData, num_examples: int) -> Examples:
    """Return a copy of the first `num_examples` public examples, or of all if there are fewer."""
    return data.test.take(np.arange(min(num_examples, len(data.test))))


def to_tensors(examples: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the features (n, ...) and the targets (n, ...) as tensors on a device."""
    features, targets = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
    return features.to(device), targets.to(device)

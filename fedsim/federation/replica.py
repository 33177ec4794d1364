"""What every process of a federation makes for itself, and alike: the model, and how it is tried.

Models are tried on public examples, the first of the server's test set, never on private ones.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment
from fedsim.models.build import build_model
from fedsim.models.metrics import Task

TRIED = 3
"""Public examples on which a model is tried, and the way to its gradients chosen."""

PROBED = 64
"""Public examples on which training together is compared with training alone."""


def initial_model(
    experiment: Experiment, data: FederatedData, task: Task, *, base: Path
) -> nn.Module:
    """Return the initial model, with the same weights in every process."""
    return build_model(
        experiment.model,
        input_shape=data.input_shape,
        num_outputs=task.num_outputs,
        seed=experiment.seed,
        base=base,
    )


def first_public(data: FederatedData, count: int) -> Examples:
    """Return a copy of the first `count` public examples, or of all if there are fewer."""
    return data.test.take(np.arange(min(count, len(data.test))))


def tensors_of(examples: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return features and targets on a device."""
    features, targets = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
    return features.to(device), targets.to(device)

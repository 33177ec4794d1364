"""Metrics of clients on their own examples, averaged by secure aggregation.

They score the model that a round starts from. Their mean over clients, weighted by examples, is the
objective of the federation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import Examples
from fedsim.models.losses import PerExampleLoss
from fedsim.models.metrics import Task, evaluate

PREFIX = "train_"


@dataclass(frozen=True)
class TrainMetrics:
    """The declared metrics of a model on the examples of one client.

    Attributes:
        names: the declared metrics, such as `train_loss`.
        loss: one value per example.
        task: scores outputs.
        examples: returns the client's examples; called once for each measurement.
    """

    names: tuple[str, ...]
    loss: PerExampleLoss
    task: Task
    examples: Callable[[], Examples]

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        """Return the means over the client's examples; the model's train and eval modes are kept.

        Guarantee: the same bits on every engine.
        """
        gathered = self.examples()
        own = Examples(_aligned_copy(gathered.features), _aligned_copy(gathered.targets))
        metrics = evaluate(model, self.loss, self.task, own)
        return {name: metrics[name.removeprefix(PREFIX)] for name in self.names}


def _aligned_copy(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy with the alignment of torch's own tensors.

    The alignment decides which kernel of a matrix product runs, and so the last bits; it differs
    between engines.
    """
    return torch.from_numpy(values).clone().numpy()

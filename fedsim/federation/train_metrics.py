"""Metrics of clients on their own examples, which secure aggregation averages without seeing one.

They are those of the model that a round starts from: their mean over clients, by examples, is the
objective that the federation minimises.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import Examples
from fedsim.federation.secure_setup import SecureSetupError
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.models.losses import PerExampleLoss
from fedsim.models.metrics import Task, evaluate

_PREFIX = "train_"


@dataclass(frozen=True)
class TrainMetrics:
    """Measures a model on the examples of one client.

    Attributes:
        names: the declared metrics, such as `train_loss`.
        loss: one value per example.
        task: says how outputs are scored.
        examples: returns the client's own; gathered when they are measured and not before.
    """

    names: tuple[str, ...]
    loss: PerExampleLoss
    task: Task
    examples: Callable[[], Examples]

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        """Return the means over the client's examples; the model's modes are restored.

        Guarantee: the same bits on every engine.
        """
        gathered = self.examples()
        own = Examples(_aligned(gathered.features), _aligned(gathered.targets))
        found = evaluate(model, self.loss, self.task, own)
        return {name: found[name.removeprefix(_PREFIX)] for name in self.names}


def _aligned(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy that begins where torch lets tensors begin.

    Matrix products go other ways through memory aligned otherwise, and each engine has put a
    client's examples somewhere else.
    """
    return torch.from_numpy(values).clone().numpy()


def check_train_metrics(
    names: Mapping[str, float], model: nn.Module, loss: PerExampleLoss, task: Task, few: Examples
) -> None:
    """Check that a task has the metrics that an experiment declares.

    Args:
        names: the declared metrics and their bounds.
        model: tried on `few`, public examples.
        loss: one value per example.
        task: says how outputs are scored.
        few: some public examples.

    Raises:
        SecureSetupError: a metric of another task; it names those that there are.
    """
    if not names:
        return
    found = {_PREFIX + name for name in evaluate(model, loss, task, few)}
    possible = [name for name in TRAIN_METRICS if name in found]
    for name in names:
        if name not in possible:
            raise SecureSetupError(
                f"secure_aggregation.metrics: this task has no {name!r}; choose from "
                f"{', '.join(possible)}"
            )

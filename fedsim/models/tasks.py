"""Tasks (classification, labels, regression): checks of outputs and targets, and task metrics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.core.metrics import TaskName
from fedsim.data.examples import Examples
from fedsim.models.catalog import LOSSES, ModelError
from fedsim.models.losses import PerExampleLoss, to_columns

Targets = NDArray[np.int64] | NDArray[np.float32]


@dataclass(frozen=True)
class Task(ABC):
    """A kind of prediction (such as regression), with its checks and metrics.

    Attributes:
        num_outputs: number of outputs per example that a built-in model needs for this task.
        name: name of the task.
    """

    num_outputs: int
    name: ClassVar[TaskName]

    @abstractmethod
    def check(self, targets: Targets) -> None:
        """Check that the targets fit this task; raise ModelError if not."""

    @abstractmethod
    def check_outputs(self, outputs: Tensor) -> None:
        """Check that outputs (batch, ...) have the shape of predictions; else raise ModelError."""

    @abstractmethod
    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over one batch, such as the number of correct predictions, float64 (m,).

        The caller adds up the results of all batches, and gives the total to the method
        `metrics`.

        Args:
            outputs: the model's outputs (batch, ...).
            targets: the same examples' targets (batch, ...).
        """

    @abstractmethod
    def metrics(self, scores: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metrics by name.

        Args:
            scores: sum of the results of `score` over all batches.
            targets: targets of all examples.
        """


class Classification(Task):
    """Task with one class per example, predicted by the largest score; the metric is accuracy."""

    name: ClassVar[TaskName] = "classification"

    def check(self, targets: Targets) -> None:
        """Check that targets are classes 0, ..., num_outputs - 1; raise ModelError if not."""
        if targets.dtype != np.int64 or targets.ndim != 1:
            raise ModelError(
                f"classification needs whole-number targets (n,), got {targets.dtype} of shape "
                f"{targets.shape}; give classes 0, 1, 2, ... or use loss mse or bce"
            )
        if targets.min() < 0 or targets.max() >= self.num_outputs:
            raise ModelError(
                f"classes must be 0, ..., {self.num_outputs - 1}, got targets from "
                f"{targets.min()} to {targets.max()}; number them from 0"
            )

    def check_outputs(self, outputs: Tensor) -> None:
        """Check that outputs have shape (batch, num_outputs or more); raise ModelError if not."""
        if outputs.ndim != 2 or outputs.shape[1] < self.num_outputs:
            raise ModelError(
                f"the model's outputs must have shape (batch, {self.num_outputs}), one score for "
                f"each of {self.num_outputs} classes, got {_shape(outputs)}; "
                "change the size of its last layer"
            )

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions in the batch, shape (1,)."""
        return (outputs.argmax(dim=1) == targets).sum(dtype=torch.float64)[None]

    def metrics(self, scores: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metric `accuracy`, the fraction of correct predictions."""
        return {"accuracy": scores[0].item() / len(targets)}


class Labels(Task):
    """The task with binary labels; a logit > 0 predicts label 1, and the metric is accuracy."""

    name: ClassVar[TaskName] = "labels"

    def check(self, targets: Targets) -> None:
        """Check that every target is 0 or 1; raise ModelError if not."""
        if not np.isin(targets, (0, 1)).all():
            wrong = targets[~np.isin(targets, (0, 1))][0]
            raise ModelError(
                f"loss bce needs targets 0 or 1, got {wrong}; "
                "use cross_entropy for more classes, mse for numbers"
            )

    def check_outputs(self, outputs: Tensor) -> None:
        """Check that there is one logit per label; raise ModelError if not."""
        _check_columns(outputs, self.num_outputs, "label")

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correctly predicted labels in the batch, shape (1,)."""
        logits, labels = to_columns(outputs, targets, "accuracy")
        return ((logits > 0) == (labels > 0.5)).sum(dtype=torch.float64)[None]

    def metrics(self, scores: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metric `accuracy`, the fraction of labels that are predicted correctly."""
        return {"accuracy": scores[0].item() / targets.size}


class Regression(Task):
    """The task with real-valued targets; the metrics are mean squared error and R²."""

    name: ClassVar[TaskName] = "regression"

    def check(self, targets: Targets) -> None:
        """Accept all targets, as any number is valid."""

    def check_outputs(self, outputs: Tensor) -> None:
        """Check that there is one output per target; raise ModelError if not."""
        _check_columns(outputs, self.num_outputs, "target")

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each of the k outputs, summed over the batch, shape (k,)."""
        predicted, actual = to_columns(outputs.double(), targets, "mse")
        return (predicted - actual).square().sum(dim=0)

    def metrics(self, scores: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metrics `mse` and `r2`, averaged over the k columns of the targets.

        As in scikit-learn, r2 of a constant column is 1 if every prediction is exact, else 0.
        """
        actual = targets.reshape(len(targets), -1).astype(np.float64)
        errors = scores.cpu().numpy()
        spread = np.square(actual - actual.mean(axis=0)).sum(axis=0)
        r2 = np.where(errors == 0, 1.0, 0.0)
        np.divide(errors, spread, out=r2, where=spread > 0)
        r2[spread > 0] = 1 - r2[spread > 0]
        return {"mse": float(errors.sum() / actual.size), "r2": float(r2.mean())}


def task_for(loss_name: str, targets: Targets, *, num_classes: int | None = None) -> Task:
    """Return the task (kind of prediction) that fits a loss and its targets.

    The loss `cross_entropy` gives `Classification`, `bce` gives `Labels` and `mse` gives
    `Regression`. A user's loss function gives `Classification` for whole-number targets >= 0 and
    `Regression` for other targets.

    Args:
        loss_name: the setting `model.loss`.
        targets: targets (n,) or (n, k) of any part of the data.
        num_classes: number of classes in all data (`FederatedData.num_classes`); None takes it from
            `targets`.

    Raises:
        ModelError: the targets do not fit that task.

    Example:
        >>> import numpy as np
        >>> from fedsim.models.tasks import task_for
        >>> task_for("cross_entropy", np.array([0, 2, 1])).num_outputs
        3
    """
    width = targets.shape[1] if targets.ndim == 2 else 1
    task: Task
    seen = int(targets.max()) + 1 if _has_classes(targets) else 1
    if loss_name == "cross_entropy" or (loss_name not in LOSSES and _has_classes(targets)):
        task = Classification(seen if num_classes is None else num_classes)
    elif loss_name == "bce":
        task = Labels(width)
    else:
        task = Regression(width)
    task.check(targets)
    return task


def _has_classes(targets: Targets) -> bool:
    return targets.dtype == np.int64 and targets.min() >= 0


def _check_columns(outputs: Tensor, width: int, target: str) -> None:
    columns = outputs[0].numel() if outputs.ndim else 0
    if columns != width:
        raise ModelError(
            f"the model's outputs must have shape (batch, {width}), one per {target}, got "
            f"{_shape(outputs)}; change the size of its last layer"
        )


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def evaluate(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
    on_batch: Callable[[Tensor], object] = lambda outputs: None,
) -> dict[str, float]:
    """Return the mean `loss` over all examples and the metrics (`accuracy`, or `mse` and `r2`).

    Args:
        model: the model. It runs in eval mode; afterwards its training modes are restored.
        loss: the loss, which returns one value per example.
        task: the task that scores the outputs (`task_for`).
        examples: the evaluation set.
        batch_size: number of examples per forward pass; it changes memory and speed only.
        device: device to which the model is moved; None keeps the model's device.
        on_batch: function that is called with the outputs of each batch.

    Raises:
        ValueError: the batch size is below 1.

    Edge cases:
        The loss of a diverged model is not finite; it is returned unchanged.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    where = torch.device(device) if device is not None else device_of(model)
    if device is not None:
        model.to(where)
    total = torch.zeros((), dtype=torch.float64, device=where)
    scores = torch.zeros(1, dtype=torch.float64, device=where)
    with eval_mode(model), torch.no_grad():
        for start in range(0, len(examples), batch_size):
            rows = slice(start, start + batch_size)
            inputs = torch.from_numpy(examples.features[rows]).to(where)
            targets = torch.from_numpy(examples.targets[rows]).to(where)
            outputs = model(inputs)
            total = total + loss(outputs, targets).sum(dtype=torch.float64)
            scores = scores + task.score(outputs, targets)
            on_batch(outputs)
    return {
        "loss": total.item() / len(examples),
        **task.metrics(scores.cpu(), examples.targets),
    }


def evaluate_with_outputs(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    device: torch.device | str | None = None,
) -> tuple[dict[str, float], Tensor]:
    """Return the loss and metrics as `evaluate` does, and the model's outputs (n, ...) on the CPU.

    Args:
        model: the model. It runs in eval mode; afterwards its training modes are restored.
        loss: the loss, which returns one value per example.
        task: the task that scores the outputs (`task_for`).
        examples: the evaluation set.
        device: device to which the model is moved; None keeps the model's device.
    """
    outputs: list[Tensor] = []
    metrics = evaluate(
        model, loss, task, examples, device=device, on_batch=lambda part: outputs.append(part.cpu())
    )
    return metrics, torch.cat(outputs)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode in the `with` block, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU for a model without parameters."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device

"""Evaluation of a model: its loss and its task's metrics on a set of examples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedsim.data.examples import Examples
from fedsim.models.losses import PerExampleLoss
from fedsim.models.tasks import Task as Task
from fedsim.models.tasks import task_for as task_for


def evaluate(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Return the mean `loss` and the task's metrics (`accuracy`, or `mse` and `r2`).

    Args:
        model: runs in eval mode; its modes are restored.
        loss: returns one value per example.
        task: scores the outputs (`task_for`).
        examples: the evaluation set.
        batch_size: examples per forward pass; changes memory and speed only.
        device: the model is moved there; None: the device of the model.

    Raises:
        ValueError: the batch size is below 1.

    Edge cases:
        The loss of a diverged model is not finite; it is returned unchanged.
    """
    return _evaluate(
        model, loss, task, examples, batch_size=batch_size, device=device, each=lambda outputs: None
    )


def evaluate_with_outputs(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    device: torch.device | str | None = None,
) -> tuple[dict[str, float], Tensor]:
    """Return the metrics as `evaluate` does, and the outputs (n, ...) on the CPU.

    Args:
        model: runs in eval mode; its modes are restored.
        loss: returns one value per example.
        task: scores the outputs (`task_for`).
        examples: the evaluation set.
        device: the model is moved there; None: the device of the model.
    """
    outputs: list[Tensor] = []
    found = _evaluate(
        model, loss, task, examples, device=device, each=lambda batch: outputs.append(batch.cpu())
    )
    return found, torch.cat(outputs)


def _evaluate(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    each: Callable[[Tensor], None],
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Return the metrics as `evaluate` does, and call `each` with the outputs of each batch."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    where = torch.device(device) if device is not None else _device_of(model)
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
            each(outputs)
    return {
        "loss": total.item() / len(examples),
        **task.metrics(scores.cpu(), examples.targets),
    }


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode; afterwards restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device

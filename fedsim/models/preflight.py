"""A trial of model, loss and data on a few examples, before any charge."""

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core.plugins import plugin_calls
from fedsim.data.examples import Examples
from fedsim.models.errors import ModelError
from fedsim.models.losses import PerExampleLoss, check_loss
from fedsim.models.metrics import eval_mode
from fedsim.models.tasks import Task

_NUM_CHECK_EXAMPLES = 3
_SENT_TYPES = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    }
)


def preflight(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    name: str = "model.loss",
) -> None:
    """Run the model and the loss on the first examples and check the results.

    The model runs in eval mode without gradients; its modes are restored.

    Args:
        model: the initial model.
        loss: returns one value per example.
        task: checks outputs and targets (`task_for`).
        examples: all targets are checked; the model runs on the first few examples.
        name: name of the loss in the messages.

    Raises:
        ModelError: a check failed; one line with the shapes and the fix.
    """
    _check_types(model)
    task.check(examples.targets)
    few = examples.take(np.arange(min(_NUM_CHECK_EXAMPLES, len(examples))))
    inputs, targets = torch.from_numpy(few.features), torch.from_numpy(few.targets)
    device = next((parameter.device for parameter in model.parameters()), None)
    inputs, targets = inputs.to(device), targets.to(device)
    with eval_mode(model), torch.no_grad():
        outputs = _outputs(model, inputs)
        _outputs(model, inputs[:1])
    task.check_outputs(outputs)
    check_loss(loss, outputs, targets, name=name)


def _check_types(model: nn.Module) -> None:
    """Check that every value of the model can be sent: arrays on the wire are numpy's."""
    for name, value in model.state_dict().items():
        if value.dtype not in _SENT_TYPES:
            kind = str(value.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name!r} has type {kind}, which no array on the wire has; keep parameters and "
                f"buffers in float32, and run the forward pass under torch.autocast for arithmetic "
                f"in {kind}"
            )


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    what = f"the model failed on inputs of shape {tuple(inputs.shape)}"
    fix = f"build it for examples of shape {tuple(inputs.shape[1:])}"
    other = {p.dtype for p in model.parameters()} - {inputs.dtype}
    if other and inputs.is_floating_point():
        own, features = (str(kind).removeprefix("torch.") for kind in (other.pop(), inputs.dtype))
        fix = f"keep its parameters in {features}, the type of the features; they are {own}"
    with plugin_calls(what, raises=ModelError, fix=fix):
        outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        raise ModelError(f"the model must return a tensor, got {type(outputs).__name__}")
    if outputs.ndim == 0 or len(outputs) != len(inputs):
        raise ModelError(
            f"the model's outputs must have one row per example, got shape {tuple(outputs.shape)} "
            f"for a batch of {len(inputs)}; do not squeeze() or flatten the batch"
        )
    if not outputs.is_floating_point():
        raise ModelError(f"the model's outputs must be real numbers, got {outputs.dtype}")
    if not outputs.isfinite().all():
        raise ModelError(
            "the initial model's outputs are not finite; scale the features or check the model"
        )
    return outputs

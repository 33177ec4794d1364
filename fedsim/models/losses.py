"""Losses that return one value per example, as per-example clipping needs them."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.plugins import PluginError, describe_error, resolve, source_file
from fedsim.models.catalog import LOSSES
from fedsim.models.errors import ModelError

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to losses (batch,)."""


class CrossEntropy:
    """The cross-entropy of class scores (batch, classes) and classes (batch,).

    It knows its gradient at the scores (`KnownGradient`): that saves a backward pass of torch,
    which for a small model takes as long as its arithmetic.
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per example."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the sum of the weighted losses at the outputs.

        The steps are those that torch records for its backward pass, so every bit is the same.
        """
        if outputs.ndim != 2 or targets.ndim != 1:
            leaf = outputs.detach().requires_grad_()
            with torch.enable_grad():
                losses = self(leaf, targets)
                total = losses.sum() if weights is None else torch.dot(losses, weights)
            return torch.autograd.grad(total, leaf)[0]
        aten, ignored = torch.ops.aten, -100
        logs = torch.log_softmax(outputs.detach(), 1)
        if weights is None:
            weights = logs.new_ones(logs.shape[0])
        total = logs.new_empty(())  # read only where losses are averaged
        g = aten.nll_loss_backward.default(weights, logs, targets, None, 0, ignored, total)
        return aten._log_softmax_backward_data.default(g, logs, 1, logs.dtype)


cross_entropy = CrossEntropy()


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error, averaged over the outputs of an example.

    Raises:
        ModelError: if an example has not as many outputs as targets; they are never broadcast.
    """
    outputs, targets = to_columns(outputs, targets, "mse")
    return (outputs - targets).square().mean(dim=1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits, averaged over the labels of an example.

    Raises:
        ModelError: if an example has not as many outputs as targets; they are never broadcast.
    """
    outputs, targets = to_columns(outputs, targets, "bce")
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)


def to_columns(outputs: Tensor, targets: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return outputs and targets as (batch, k) in the outputs' type; (batch,) is one column.

    Raises:
        ModelError: naming `what`, if the two have not the same number of columns.
    """
    flat = [t.unsqueeze(1) if t.ndim == 1 else t.flatten(1) for t in (outputs, targets)]
    if flat[0].shape != flat[1].shape:
        raise ModelError(
            f"{what}: outputs of shape {tuple(outputs.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}; the model must give one output per target"
        )
    return flat[0], flat[1].to(outputs.dtype)


_PER_EXAMPLE = "return one value per example, as with reduction='none'"
_BUILT_IN: dict[str, PerExampleLoss] = {"cross_entropy": cross_entropy, "mse": mse, "bce": bce}


def resolve_loss(name: str, base: Path) -> PerExampleLoss:
    """Return the loss that `model.loss` names.

    Args:
        name: a built-in name, `package.module:callable` or `./file.py:callable`.
        base: the directory of the experiment file.

    Raises:
        ModelError: if there is no such loss. A user's loss is not tried here; see `check_loss`.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        try:
            return resolve(name, base=base, what="model.loss")
        except PluginError as error:
            raise ModelError(str(error)) from error
    close = get_close_matches(name, LOSSES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"built in: {', '.join(LOSSES)}"
    raise ModelError(
        f"model.loss: no loss named {name!r}; {hint} "
        "(your own: package.module:callable or ./file.py:callable)"
    )


@torch.enable_grad()
def check_loss(
    loss: PerExampleLoss, outputs: Tensor, targets: Tensor, *, name: str = "model.loss"
) -> None:
    """Try a loss on a few examples: one finite value each, which no other example changes.

    A loss that couples the examples of a batch would void the clipping bound and with it ε.

    Args:
        loss: the loss.
        outputs: of the model, (batch, ...), for 2 or 3 examples.
        targets: of the same examples, (batch, ...).
        name: what the messages call the loss.

    Raises:
        ModelError: with one line with the mistake and the fix.
    """
    outputs = outputs.detach().requires_grad_()
    together = _losses(loss, outputs, targets, name)
    if not together.isfinite().all():
        raise ModelError(
            f"{name}: is not finite on the initial model ({_values(together)}); "
            "scale the features or check the targets"
        )
    _check_gradients(together, outputs, name)
    alone = torch.cat(
        [_losses(loss, outputs[i : i + 1], targets[i : i + 1], name) for i in range(len(outputs))]
    )
    if not torch.allclose(alone, together, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"{name}: an example's loss depends on the other examples of its batch "
            f"({_values(together)} together, {_values(alone)} one by one); {_PER_EXAMPLE}"
        )


def _losses(loss: PerExampleLoss, outputs: Tensor, targets: Tensor, name: str) -> Tensor:
    try:
        values = loss(outputs, targets)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name}: failed with {describe_error(error, file=source_file(loss))} on outputs of "
            f"shape {tuple(outputs.shape)} and targets {_dtype(targets)} of shape "
            f"{tuple(targets.shape)}"
        ) from error
    if not isinstance(values, Tensor):
        raise ModelError(f"{name}: must return a tensor, got {type(values).__name__}")
    batch = len(outputs)
    if values.shape != (batch,):
        fix = "do not squeeze() the batch" if batch == 1 else _PER_EXAMPLE
        raise ModelError(
            f"{name}: must return shape ({batch},) for a batch of {batch}, got shape "
            f"{tuple(values.shape)}; {fix}"
        )
    return values


def _check_gradients(losses: Tensor, outputs: Tensor, name: str) -> None:
    if not losses.requires_grad:
        raise ModelError(
            f"{name}: no gradient reaches the outputs; compute it with torch operations, "
            "without detach() or numpy"
        )
    for index, value in enumerate(losses):
        (gradient,) = torch.autograd.grad(value, outputs, retain_graph=True, materialize_grads=True)
        others = gradient.clone()
        others[index] = 0
        if others.any():
            raise ModelError(
                f"{name}: the loss of one example has a gradient at the outputs of another; "
                f"{_PER_EXAMPLE}"
            )


def _values(tensor: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in tensor.tolist())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

"""Loss functions that return one value per example, as per-example clipping requires."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.clients.gradients.per_example import PerExampleLoss as PerExampleLoss
from fedsim.core.errors import raised_as
from fedsim.core.plugins import plugin_calls, resolve, unknown_plugin
from fedsim.models.catalog import LOSSES, ModelError


class CrossEntropy:
    """The cross-entropy loss of each example, from class scores (batch, classes) and true classes.

    Its gradient with respect to the scores is computed by a formula (`output_gradient`). That is
    faster than a backward pass of torch through the loss.
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example (batch,).

        Args:
            outputs: class scores (batch, classes).
            targets: true classes (batch,).
        """
        return F.cross_entropy(outputs, targets, reduction="none")

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the weighted sum of losses with respect to the outputs.

        The result has shape (batch, classes). As in torch, an example with target -100 has loss 0,
        and any other target that is no class raises an error.

        Args:
            outputs: class scores (batch, classes).
            targets: true classes (batch,).
            weights: weight of each example's loss (batch,); None stands for weights of 1.
        """
        if outputs.ndim != 2 or targets.ndim != 1:
            leaf = outputs.detach().requires_grad_()
            with torch.enable_grad():
                losses = self(leaf, targets)
                total = losses.sum() if weights is None else torch.dot(losses, weights)
            return torch.autograd.grad(total, leaf)[0]
        g, ignored = torch.softmax(outputs.detach(), 1), targets == _IGNORED
        known = g.new_ones(g.shape[0]) if weights is None else weights.to(g)
        column = known.masked_fill(ignored, 0).unsqueeze(1)
        classes = targets.masked_fill(ignored, 0).unsqueeze(1)
        return g.mul_(column).scatter_add_(1, classes, -column)


_IGNORED = -100  # target of examples without a loss, as in torch
cross_entropy = CrossEntropy()


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each example's squared error, averaged over the example's outputs, (batch,).

    Args:
        outputs: predictions (batch,) or (batch, k).
        targets: true values, with as many columns as the outputs.

    Raises:
        ModelError: outputs and targets have different numbers of values per example; they are
            never broadcast.

    Example:
        >>> import torch
        >>> from fedsim.models.losses import mse
        >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])).tolist()
        [1.0, 9.0]
    """
    outputs, targets = to_columns(outputs, targets, "mse")
    return (outputs - targets).square().mean(dim=1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each example's binary cross-entropy, averaged over the example's labels, (batch,).

    Args:
        outputs: logits (batch,) or (batch, k).
        targets: labels 0 or 1, with as many columns as the outputs.

    Raises:
        ModelError: outputs and targets have different numbers of values per example; they are
            never broadcast.

    Example:
        >>> import torch
        >>> from fedsim.models.losses import bce
        >>> bce(torch.zeros(2, 3), torch.ones(2, 3)).round(decimals=3).tolist()
        [0.6930000185966492, 0.6930000185966492]
    """
    outputs, targets = to_columns(outputs, targets, "bce")
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)


def to_columns(outputs: Tensor, targets: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in the shape (batch, k) and in the type of the outputs.

    An array (batch,) becomes one column.

    Args:
        outputs: outputs of the model, (batch,) or (batch, ...).
        targets: targets of the examples, (batch,) or (batch, ...).
        name: name of the loss or metric in the message.

    Raises:
        ModelError: outputs and targets have different numbers of columns.
    """
    flat = [t.unsqueeze(1) if t.ndim == 1 else t.flatten(1) for t in (outputs, targets)]
    if flat[0].shape != flat[1].shape:
        raise ModelError(
            f"{name}: outputs of shape {tuple(outputs.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}; the model must give one output per target"
        )
    return flat[0], flat[1].to(outputs.dtype)


_PER_EXAMPLE = "return one value per example, as with reduction='none'"
_BUILT_IN: dict[str, PerExampleLoss] = {"cross_entropy": cross_entropy, "mse": mse, "bce": bce}


def resolve_loss(name: str, base: Path) -> PerExampleLoss:
    """Return the loss function that `model.loss` names.

    Args:
        name: a built-in name, `package.module:callable` or `./file.py:callable`.
        base: the directory of the experiment file.

    Raises:
        ModelError: there is no such loss. `check_loss` finds errors inside a user's loss.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from fedsim.models.losses import resolve_loss
        >>> loss = resolve_loss("cross_entropy", base=Path())
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 3])).round(decimals=3).tolist()
        [1.3860000371932983, 1.3860000371932983]
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        with raised_as(ModelError):
            return resolve(name, base=base, setting="model.loss")
    raise ModelError(unknown_plugin("model.loss", "loss", name, LOSSES))


@torch.enable_grad()
def check_loss(
    loss: PerExampleLoss, outputs: Tensor, targets: Tensor, *, name: str = "model.loss"
) -> None:
    """Check that each example has one finite loss, which no other example changes.

    The check runs on 2 or 3 examples. A loss that couples the examples of a batch would invalidate
    the clipping bound and so ε.

    Args:
        loss: the loss.
        outputs: the model's outputs (batch, ...) for 2 or 3 examples.
        targets: the same examples' targets (batch, ...).
        name: name of the loss in the messages.

    Raises:
        ModelError: the check failed; the message is one line with the mistake and the fix.
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
    shapes = (
        f"it had outputs of shape {tuple(outputs.shape)} and targets "
        f"{str(targets.dtype).removeprefix('torch.')} "
        f"of shape {tuple(targets.shape)}"
    )
    with plugin_calls(f"{name}: failed", raises=ModelError, fix=shapes):
        values = loss(outputs, targets)
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

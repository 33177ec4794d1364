"""The gradient of a loss at the outputs: from the loss if it knows it, else by torch."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.interface import PerExampleLoss, UncoveredParameterError


class KnownGradient(Protocol):
    """A loss that knows its gradient without a backward pass of torch."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return, to the bit, what torch gives for the sum of weighted losses at the outputs."""
        ...


def loss_gradient(
    loss: PerExampleLoss,
    outputs: Tensor,
    targets: Tensor,
    parameters: FlatParameters,
    weights: Tensor | None = None,
) -> Tensor | None:
    """Return the gradient of the sum of losses at the outputs, None where there is none.

    Args:
        loss: one value per example.
        outputs: (n, ...).
        targets: (n, ...).
        parameters: the model's, which the loss must not use.
        weights: of the losses (n,).

    Raises:
        UncoveredParameterError: the loss uses parameters by itself.
    """
    known = known_gradient(loss)
    if known is not None:
        return known.output_gradient(outputs, targets, weights)
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(leaf, targets)
        total = losses.sum() if weights is None else torch.dot(losses, weights)
    if not total.requires_grad:
        return None
    wanted = (leaf, *parameters.tensors)
    found, *strayed = torch.autograd.grad(total, wanted, allow_unused=True)
    refuse_strayed(strayed, parameters)
    return found


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return the loss if it knows its gradient."""
    # To ask for an instance of a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None


def refuse_strayed(strayed: Sequence[Tensor | None], parameters: FlatParameters) -> None:
    """Refuse gradients that reached parameters by a way that no use has seen.

    Raises:
        UncoveredParameterError: there is one.
    """
    missed = tuple(i for i, gradient in enumerate(strayed) if gradient is not None)
    if missed:
        names = ", ".join(parameters.names[i] for i in missed)
        raise UncoveredParameterError(f"book-keeping has no rule for how {names} is used", missed)

"""Check that losses of examples depend on the outputs of their own rows alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.clients.model_checks.safety import UnsafeModelError


def check_own_rows(losses: Tensor, outputs: Sequence[Tensor]) -> None:
    """Refuse losses (n,) that reach the outputs of other examples.

    Where loss i depends on the rows of example i alone, the gradient of Σ w_i loss_i at these rows
    is w_i times that of Σ loss_i, for any weights w. Two backward passes to the outputs compare the
    two for random weights. A dependence that has no gradient is not found.

    Args:
        losses: of n examples.
        outputs: of the model, n rows or n times the same number of rows.

    Raises:
        UnsafeModelError: a loss depends on the outputs of another example.
    """
    n = len(losses)
    found = [value for value in outputs if value.requires_grad and n and not len(value) % n]
    if n < 2 or not found:
        return
    generator = torch.Generator().manual_seed(n)
    weights = (torch.rand(n, generator=generator) + 0.5).to(losses)
    plain, weighted = (
        torch.autograd.grad(losses, found, w, retain_graph=True, materialize_grads=True)
        for w in (torch.ones_like(losses), weights)
    )
    for one, other in zip(plain, weighted, strict=True):
        rows = weights.repeat_interleave(len(one) // n).view(-1, *[1] * (one.ndim - 1)).to(one)
        off, size = (other - rows * one).flatten(), (rows * one).flatten()
        finite = off.isfinite() & size.isfinite()
        eps = torch.finfo(one.dtype).eps
        if float(off[finite].norm()) > eps**0.6 * float(size[finite].norm()):
            raise UnsafeModelError(
                "the loss of an example depends on the outputs of other examples, as in a "
                "contrastive loss or one that is divided by a sum over the lot; compute each "
                "example's loss from its own outputs"
            )

"""What a loss of one value does over the examples of a lot: a mean, a sum, or neither."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.clients.model_checks.isolation_probe import Probe, ProbeLot
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state

Reduction = Literal["mean", "sum", "none"]

_MAX_EXAMPLES = 32  # different ones; each costs a backward pass


def find_reduction(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    features: Tensor,
    targets: Tensor,
    lot: int,
) -> Reduction:
    """Return how a loss treats a lot of the size that is trained; "none": one value per example.

    The gradient of a lot, filled by repeating the examples, is compared with those of the examples
    alone. Class weights under a mean, ignored labels under a mean and couplings that need a large
    lot make it neither their mean nor their sum.

    Args:
        model: as it will be trained.
        loss: from outputs and targets (n, ...) to one value, or one per example.
        features: at least 2 public examples (n, ...); the first 32 are used.
        targets: their targets (n, ...), with all kinds of labels that the loss treats apart.
        lot: examples in a lot.

    Guarantee:
        parameters, buffers, modes and global random generators are restored.

    Raises:
        UnsafeModelError: the loss is neither a mean nor a sum over the examples, or the examples
            have no gradient.
    """
    most = min(len(features), _MAX_EXAMPLES)
    places = torch.arange(max(lot, most)) % most
    counts = torch.bincount(places).double()
    few = ProbeLot(features[:most], targets[:most])
    whole = ProbeLot(features[places.to(features.device)], targets[places.to(targets.device)])
    with preserve_state(model), torch.enable_grad():
        model.eval()  # dropout would draw different masks for a lot and for one example
        probe = Probe(model, loss)
        if probe.losses(whole).ndim:
            return "none"
        together = probe.gradients(whole)[0].double()
        alone = torch.stack([probe.gradients(few.only(i))[0].double() for i in range(most)])
    alone.nan_to_num_(0.0, 0.0, 0.0)  # an ignored label alone is 0/0: it has no gradient
    counts = counts.to(alone)
    size = float(counts @ alone.norm(dim=1))
    if not size > 0.0:
        raise UnsafeModelError(
            "the examples have no gradient, so it cannot be checked whether the loss is a mean or "
            "a sum over them; check with examples that the model does not fit already"
        )
    total = counts @ alone
    factors: dict[Reduction, int] = {"mean": len(places), "sum": 1}
    for reduction, factor in factors.items():
        if float((together * factor - total).norm()) <= probe.tolerance_other_shape * size:
            return reduction
    raise UnsafeModelError(
        f"the loss of {len(places)} examples is neither the mean nor the sum of the losses of each "
        "alone: it divides by something that depends on the other examples, such as their class "
        "weights or the number of labels that are not ignored, or mixes them. Return one value per "
        "example (reduction='none') and call engine.backward(losses)"
    )

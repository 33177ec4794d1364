"""Chooses how per-example gradients are computed: the fastest way that is right for a model."""

import logging

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.per_example import (
    BookKeeping,
    LoopGradients,
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
    VmapGradients,
)

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3  # relative, of a gradient; a coupled or mis-assigned example is off by order 1


def gradients_for(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor
) -> PerExampleGradients:
    """Return book-keeping where it is right, else vmap where it works, else the loop.

    Book-keeping is tried on the given examples and compared, example by example, with gradients
    computed alone: a model that couples examples, or lays out its batch in another way, is found.

    Args:
        model: its trainable parameters become views of one flat tensor.
        loss: one value per example.
        features: a few public or synthetic examples (n ≥ 2, ...), never private ones: which way
            is chosen must not depend on private data.
        targets: their targets.
    """
    exact = LoopGradients(model, loss)
    fast = BookKeeping(model, loss, parameters=exact.parameters)
    training = model.training
    model.eval()  # dropout would draw different masks for a lot and for one example
    try:
        reason = _difference(fast, exact, features, targets)
    finally:
        model.train(training)
    if reason is None:
        return fast
    logger.info("per-example gradients: not by book-keeping, because %s", reason)
    vectorised = VmapGradients(model, loss, parameters=exact.parameters)
    return vectorised if _works(vectorised, features, targets) else exact


def _difference(
    fast: BookKeeping, exact: LoopGradients, features: Tensor, targets: Tensor
) -> str | None:
    """Return why book-keeping is not right for these examples, None if it is."""
    try:
        ours = per_example_gradients(fast, features, targets)
    except (UncoveredParameterError, RuntimeError, TypeError) as error:
        return str(error)
    for i in range(len(features)):
        into = torch.zeros_like(exact.parameters.data)
        unclipped = FlatClipping(float("inf"))
        groups = unclipped.groups(exact.parameters)
        exact.add_clipped_sum(
            features[i : i + 1], targets[i : i + 1], unclipped, groups, into
        )
        scale = into.norm() + torch.finfo(into.dtype).tiny
        if not (ours[i] - into).norm() <= _TOLERANCE * scale:
            return f"example {i} has another gradient in a lot than alone"
    return None


def per_example_gradients(
    gradients: BookKeeping, features: Tensor, targets: Tensor
) -> Tensor:
    """Return all per-example gradients (n, size): for checks, on a few examples."""
    rows = torch.zeros(len(features), gradients.parameters.size, dtype=gradients.parameters.data.dtype)
    places = gradients.parameters.slices(range(len(gradients.parameters.tensors)))
    for use in gradients.record(features, targets):
        with torch.no_grad():
            for index, values in use.per_example().items():
                rows[:, places[index]] += values.flatten(1).to(rows)
    return rows


def _works(backend: PerExampleGradients, features: Tensor, targets: Tensor) -> bool:
    """Tell whether a backend can run a model at all."""
    into = torch.zeros_like(backend.parameters.data)
    clipping = FlatClipping(1.0)
    try:
        backend.add_clipped_sum(
            features, targets, clipping, clipping.groups(backend.parameters), into
        )
    except (RuntimeError, NotImplementedError):
        # Data-dependent control flow, in-place writes, operations without a batching rule.
        return False
    return True

"""Per-example gradients one example at a time by plain autograd: the reference for any model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.per_example import PaddedBatch, PerExampleGradients


class OneAtATime(PerExampleGradients):
    """Gradient method that computes per-example gradients in a loop, one example at a time."""

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from parameter index to the gradients of all rows of a padded batch.

        Args:
            values: not used, as the model holds the client's parameters.
            padded: padded batch of one client.
        """
        gradients = list[Sequence[Tensor]]()
        pairs = zip(padded.features.split(1), padded.targets.split(1), strict=True)
        for row, (x, y) in enumerate(pairs):
            if padded.randomness is not None:
                padded.randomness.only(row)
            with padded.keyed:
                gradients.append(self._of_example(x, y))
        held = {i: torch.stack(parts) for i, parts in enumerate(zip(*gradients, strict=True))}
        return dict.fromkeys(held, ExampleUse(held))

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)

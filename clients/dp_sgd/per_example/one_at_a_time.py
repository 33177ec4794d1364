"""One example at a time by plain autograd: the reference, for any model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients, RowGradients, Tile
from fedsim.clients.dp_sgd.per_example.layers.base import ExampleUse
from fedsim.clients.dp_sgd.per_example.norms import zero_rows


class OneAtATime(PerExampleGradients):
    """Each example is alone in its batch, so no gradient can depend on another example."""

    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, RowGradients]:
        """Return the gradients of a tile's rows, of one client whose values the model holds."""
        return {i: g for i, g in enumerate(self._held(tile.features, tile.targets))}

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        held = self._held(features, targets)
        return torch.cat([g.values.flatten(1) for g in held], dim=1)

    def _held(self, features: Tensor, targets: Tensor) -> list["HeldRows"]:
        pairs = zip(features.split(1), targets.split(1), strict=True)
        found = [self._of_example(x, y) for x, y in pairs]
        return [HeldRows(i, torch.stack(parts)) for i, parts in enumerate(zip(*found, strict=True))]

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)


class HeldRows(ExampleUse):
    """Gradients (n, *shape) of one parameter."""

    def __init__(self, index: int, values: Tensor) -> None:
        self._index, self.values = index, values.detach()

    @property
    def parameters(self) -> list[int]:
        """Index of the parameter."""
        return [self._index]

    def per_example(self, index: int) -> Tensor:
        """Return the gradient of each row (n, *shape)."""
        return self.values

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""
        self.values = zero_rows(self.values, dropped)

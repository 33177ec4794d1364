"""One example at a time by plain autograd: the reference, for any model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.clients.gradients.interface import PerExampleGradients, Tile
from fedsim.clients.gradients.layers.base import ExampleUse


class OneAtATime(PerExampleGradients):
    """Each example is alone in its batch, so no gradient can depend on another example."""

    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, ExampleUse]:
        """Return the gradients of a tile's rows, of one client whose values the model holds."""
        found = list[Sequence[Tensor]]()
        pairs = zip(tile.features.split(1), tile.targets.split(1), strict=True)
        for row, (x, y) in enumerate(pairs):
            if tile.randomness is not None:
                tile.randomness.only(row)
            with tile.keyed:
                found.append(self._of_example(x, y))
        held = {i: torch.stack(parts) for i, parts in enumerate(zip(*found, strict=True))}
        return dict.fromkeys(held, ExampleUse(held))

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)

"""Per-example gradients of examples that are each alone in their batch: vmap, and a loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients
from fedsim.clients.dp_sgd.per_example.layers import squares, without
from fedsim.clients.dp_sgd.per_example.layers.base import add_rows

_HELD = 1 << 26  # elements of per-example gradients that are held at once: 256 MB in float32


class VmapGradients(PerExampleGradients):
    """All gradients of a lot at once by `torch.func.vmap`; needs a vectorisable model.

    The loss of example i is computed with the example alone in its batch, so no gradient can
    depend on another example, whatever the model or the loss does. Lots are cut so that not more
    than 256 MB of gradients are held at once.
    """

    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""
        most = max(1, _HELD // self.parameters.size)
        total = LotStatistics(0, 0, (0,) * len(groups.bounds))
        for x, y in zip(features.split(most), targets.split(most), strict=True):
            gradients = self._by_parameter(x, y)
            with torch.no_grad():
                total += self._add_gradients(gradients, clipping, groups, into, scale)
        return total

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        return torch.cat([g.flatten(1) for g in self._by_parameter(features, targets)], dim=1)

    def _by_parameter(self, features: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradients (n, *shape) of each parameter."""
        detached = {
            name: parameter.detach()
            for name, parameter in zip(self.parameters.names, self.parameters.tensors, strict=True)
        }
        example_gradient: Callable[..., Any] = grad(self._example_loss)
        found = vmap(example_gradient, in_dims=(None, 0, 0), randomness="different")(
            detached, features, targets
        )
        return [found[name].detach() for name in self.parameters.names]

    def _add_gradients(
        self,
        gradients: Sequence[Tensor],
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        n = len(gradients[0])
        norms = {i: squares(value) for i, value in enumerate(gradients)}
        factors = self._lot_factors(norms, n, clipping, groups, scale)
        dropped = factors.dropped
        for members, column in zip(groups.members, factors.columns, strict=True):
            for i in members:
                value = gradients[i] if dropped is None else without(gradients[i], dropped)
                add_rows(value, column, into[i])
        return factors.statistics


class LoopGradients(VmapGradients):
    """One example at a time by plain autograd: the reference, for any model."""

    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""
        total = LotStatistics(0, 0, (0,) * len(groups.bounds))
        for x, y in zip(features.split(1), targets.split(1), strict=True):
            gradients = self._by_parameter(x, y)
            with torch.no_grad():
                total += self._add_gradients(gradients, clipping, groups, into, scale)
        return total

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        rows = [
            torch.cat([g.flatten(1) for g in self._by_parameter(x, y)], dim=1)
            for x, y in zip(features.split(1), targets.split(1), strict=True)
        ]
        return torch.cat(rows)

    def _by_parameter(self, features: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradients (1, *shape) of each parameter for one example."""
        with torch.enable_grad():
            value = self.loss(self.model(features), targets).sum()
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p).unsqueeze(0) for p in self.parameters.tensors]
        found = torch.autograd.grad(value, self.parameters.tensors, materialize_grads=True)
        return [gradient.unsqueeze(0) for gradient in found]

"""Sums of clipped per-example gradients, behind one interface.

Three backends agree: `BookKeeping` (fast; layers on vectors never hold a gradient per example),
`VmapGradients` (any model that vectorises) and `LoopGradients` (any model: the reference).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.alone import LoopGradients, VmapGradients
from fedsim.clients.dp_sgd.per_example.chain import chain_of
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.per_example.interface import (
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
)
from fedsim.clients.dp_sgd.per_example.layers import ExampleUse, by_parameter
from fedsim.clients.dp_sgd.per_example.layers.base import Workspace
from fedsim.clients.dp_sgd.per_example.loss_gradient import loss_gradient, refuse_strayed
from fedsim.clients.dp_sgd.per_example.module_use import Unit, units_in_place
from fedsim.clients.dp_sgd.per_example.tape import Tape

__all__ = [
    "BookKeeping",
    "LoopGradients",
    "LotStatistics",
    "PerExampleGradients",
    "PerExampleLoss",
    "UncoveredParameterError",
    "VmapGradients",
]


class BookKeeping(PerExampleGradients):
    """One forward, one backward with respect to activations, one weighted weight gradient.

    Needs a model whose parameters are all used through operations that `routes` knows, on inputs
    with one row per example, or within `units`; anything else raises `UncoveredParameterError` and
    adds nothing.

    The examples of a lot pass through the model together: a model or a loss that couples them must
    be kept out by `check_isolation`.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example.
        parameters: as laid out before.
        units: layers whose gradients are made by vmap over the layer alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        parameters: FlatParameters | None = None,
        units: Sequence[Unit] = (),
    ) -> None:
        super().__init__(model, loss, parameters=parameters)
        self.units = tuple(units)
        self._workspace = Workspace(self.parameters.tensors)
        self._chain = None if units else chain_of(model, self.parameters.index)

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
        n = features.shape[0]
        uses = self.record(features, targets)
        with torch.no_grad():
            gradients = by_parameter(uses, self.parameters.tensors, self._workspace)
            norms = {i: of.squared_norms_of(i) for i, of in gradients.items()}
            factors = self._lot_factors(norms, n, clipping, groups, scale)
            if factors.dropped is not None:
                for of in gradients.values():
                    of.drop(factors.dropped)
            for members, column in zip(groups.members, factors.columns, strict=True):
                for i in members:
                    if i in gradients:
                        gradients[i].add_weighted(i, column, into[i])
        return factors.statistics

    def record(self, features: Tensor, targets: Tensor) -> Sequence[ExampleUse]:
        """Return the uses of parameters for a lot, filled in by one forward and one backward.

        Raises:
            UncoveredParameterError: a parameter was used in a way that no rule covers.
        """
        if self._chain is not None and self._chain.undisturbed:
            return self._chain.record(
                features, lambda y: loss_gradient(self.loss, y, targets, self.parameters)
            )
        tape = Tape(self.parameters.index, len(features))
        units = units_in_place(self.units, len(features), self.parameters)
        with torch.enable_grad(), units as recorded:
            with tape:
                outputs = self.model(features)
            loss = self.loss(outputs, targets).sum()
        leaves = [leaf for use in recorded for leaf in use.leaves]
        found = tape.backward(loss, (*leaves, *self.parameters.tensors))
        # A gradient that reaches a parameter itself came by a way that no use has seen.
        refuse_strayed(found[len(leaves) :], self.parameters)
        gradients = iter(found)
        return [*tape.uses, *(use.filled(gradients) for use in recorded)]

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        rows = features.new_zeros(
            len(features), self.parameters.size, dtype=self.parameters.data.dtype
        )
        places = self.parameters.slices(range(len(self.parameters.tensors)))
        for use in self.record(features, targets):
            with torch.no_grad():
                for index, values in use.per_example().items():
                    rows[:, places[index]] += values.flatten(1)
        return rows

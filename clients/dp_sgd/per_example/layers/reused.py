"""Parameters that a model uses several times: the norm of a sum needs the sum itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.layers.base import (
    ExampleGradients,
    ExampleUse,
    MaterialisedUse,
    Workspace,
    add_rows,
)
from fedsim.clients.dp_sgd.per_example.layers.linear import LinearUse
from fedsim.clients.dp_sgd.per_example.layers.norms import BUDGET, squares, with_rounding, without


def by_parameter(
    uses: Sequence[ExampleUse],
    parameters: Sequence[Tensor],
    workspace: Workspace | None = None,
) -> dict[int, ExampleGradients]:
    """Return who gives the gradients of each parameter that was used.

    Uses of one linear layer (a cell over time) are one use of a longer sequence; other repeated
    uses (a table tied to an output layer) are added, in blocks where they are large.

    Args:
        uses: filled in by a backward pass.
        parameters: the parameters that the uses have indices of.
        workspace: memory that weights which are used once may take for their gradients.
    """
    found: dict[int, list[ExampleUse]] = {}
    for use in uses:
        for index in use.parameters:
            found.setdefault(index, []).append(use)
    result: dict[int, ExampleGradients] = {}
    joined: dict[tuple[int, ...], LinearUse] = {}
    for index, several in found.items():
        if len(several) == 1:
            (only,) = several
            result[index] = only
            if isinstance(only, MaterialisedUse) and index == only.weight:
                only.workspace = workspace
            continue
        linear = [use for use in several if isinstance(use, LinearUse)]
        if len(linear) == len(several) and _alike(linear):
            key = tuple(id(use) for use in linear)
            if key not in joined:
                joined[key] = LinearUse.joined(linear)
            result[index] = joined[key]
        else:
            result[index] = SummedUses(several, parameters[index])
    return result


def _alike(uses: Sequence[LinearUse]) -> bool:
    return len({tuple(use.parameters) for use in uses}) == 1


class SummedUses:
    """The sums of the gradients of several uses of one parameter.

    Args:
        uses: the uses.
        parameter: the parameter.
    """

    def __init__(self, uses: Sequence[ExampleUse], parameter: Tensor) -> None:
        self._uses, self._parameter = uses, parameter
        self._held: Tensor | None = None

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        n, shape = self._uses[0].examples, self._parameter.shape
        if n * self._parameter.numel() <= BUDGET or not shape:
            self._held = self._sum(index, slice(None))
            return squares(self._held)
        step = max(1, BUDGET // (n * shape[1:].numel()))
        blocks = [slice(at, min(at + step, shape[0])) for at in range(0, shape[0], step)]
        total = torch.stack([squares(self._sum(index, rows)) for rows in blocks]).sum(0)
        # The uses are released one after the other, and not as the sums that were measured.
        rounding = torch.stack([use.rounding_of(index) for use in self._uses]).sum(0)
        return with_rounding(total, rounding, 0.0, 2.0)

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""
        if self._held is not None:
            add_rows(self._held, factors, into)
            return
        for use in self._uses:
            use.add_weighted(index, factors, into)

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        if self._held is not None:
            self._held = without(self._held, dropped)
            return
        for use in self._uses:
            use.drop(dropped)

    def _sum(self, index: int, rows: slice) -> Tensor:
        first, *others = self._uses
        total = first.gradients_of(index, rows)
        for use in others:
            total = total + use.gradients_of(index, rows)
        return total

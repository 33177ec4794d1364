"""Embedding tables: an example's gradient has only the rows that it looked up."""

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.layers.base import ALL, Use
from fedsim.clients.dp_sgd.per_example.layers.norms import (
    row_norms,
    squares,
    unit_roundoff,
    without,
)


class EmbeddingUse(Use):
    """Rows of a table by index (n, ...); row `padding_index` is never trained."""

    def __init__(self, weight: int, w: Tensor, padding_index: int | None) -> None:
        super().__init__(weight, None, w, None)
        self._w, self._padding = w, padding_index
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return functional.embedding(x, self._w)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Indices have no gradient."""
        raise RuntimeError("an index has no gradient")

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        owners, _, sums = self._summed()
        result = sums.new_zeros(len(self.input), dtype=torch.float64)
        return result.index_add_(0, owners, squares(sums))

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""
        owners, rows, sums = self._summed()
        into.index_add_(0, rows, sums * factors[owners].unsqueeze(1))

    def gradients_of(self, index: int, rows: slice = ALL) -> Tensor:
        """Return the gradients (n, *shape), or some rows of each: (n, rows, *shape[1:])."""
        owners, found, sums = self._summed()
        start, stop, _ = rows.indices(len(self._w))
        inside = (found >= start) & (found < stop)
        result = sums.new_zeros(len(self.input), stop - start, sums.shape[1])
        result[owners[inside], found[inside] - start] = sums[inside]
        return result

    def rounding_of(self, index: int) -> Tensor:
        """Return (n,), float64: at most so much may rounding add to what is added."""
        owners, _, sums = self._summed()
        absolute = sums.new_zeros(len(self.input), dtype=torch.float64)
        absolute.index_add_(0, owners, row_norms(sums))
        return absolute * (4 * unit_roundoff(sums))

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        owners, rows, sums = self._summed()
        self._sums = (owners, rows, without(sums, dropped[owners]))

    def _summed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return example, table row and gradient of every row that an example looked up.

        What an example looked up several times is added first: the norm is that of the sum.
        """
        if self._sums is None:
            n, table = len(self.input), len(self._w)
            found = self.input.reshape(n, -1).long()
            found = torch.where(found < 0, found + table, found)
            g = self.output_gradient.reshape(n * found.shape[1], -1)
            first = torch.arange(n, device=found.device).unsqueeze(1) * table
            keys, places = torch.unique((found + first).flatten(), return_inverse=True)
            sums = g.new_zeros(len(keys), g.shape[1]).index_add_(0, places, g)
            owners, rows = keys // table, keys % table
            if self._padding is not None:
                sums = without(sums, rows == self._padding)
            self._sums = (owners, rows, sums)
        return self._sums

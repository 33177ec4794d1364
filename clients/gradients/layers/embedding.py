"""Per-example gradients of embedding tables, which are 0 except in the rows looked up."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.base import (
    WHOLE,
    LayerUse,
    Operand,
    Part,
    Recorder,
    squares,
    zero_rows,
)


class EmbeddingUse(LayerUse):
    """One call of an embedding table with indices (n, ...); the padding row is not trained."""

    def __init__(self, weight: Operand, padding_index: int | None) -> None:
        super().__init__(weight)
        self._tables, self._padding = weight.values, padding_index
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def joined_views(self, views: int) -> "EmbeddingUse":
        """Return this call with one row per example: the lookups of all views of the example."""
        use = EmbeddingUse(self.operand, self._padding)
        use.input = self.input.unflatten(0, (-1, views))
        use.output_gradient = self.output_gradient.unflatten(0, (-1, views))
        return use

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings (n, ..., d) of the indices x (n, ...)."""
        parts = zip(x.chunk(self.clients), self._tables, strict=True)
        return torch.cat([functional.embedding(indices, table) for indices, table in parts])

    def input_gradient(self, g: Tensor) -> Tensor:
        """Raise TypeError, as the input holds indices, which have no gradient."""
        raise TypeError("an index has no gradient")

    def norm_factors(self, index: int) -> tuple[Tensor, ...]:
        """Return a tensor (n, 1), with upper bounds on the table's gradient norms."""
        owners, _, sums = self._summed()
        result = sums.new_zeros(len(self.input), dtype=torch.float64)
        return (result.index_add_(0, owners, squares(sums)).sqrt_().unsqueeze(1),)

    def add_weighted(
        self, index: int, factors: Tensor | None, into: Tensor, part: Part = WHOLE
    ) -> None:
        """Add each client's weighted sum of gradients of the table to a tensor in place."""
        owners, rows, sums = self._summed()
        size = len(self.input) // self.clients
        if part.client is not None or part.rows != WHOLE.rows:
            chosen = torch.zeros(len(self.input), dtype=torch.bool, device=owners.device)
            part.of(chosen, self.clients).fill_(True)
            kept = chosen[owners]
            owners, rows, sums = owners[kept], rows[kept], sums[kept]
        clients = owners // size - (part.client or 0)
        sums = sums.to(into.dtype)
        added = sums if factors is None else sums * factors.flatten()[owners].unsqueeze(1)
        into.index_put_((clients, rows), added, accumulate=True)

    def compute(self, index: int) -> Tensor:
        """Compute the per-example gradients (n, *shape) of the embedding table."""
        owners, rows, sums = self._summed()
        result = sums.new_zeros(len(self.input), *self._tables.shape[1:])
        result[owners, rows] = sums
        return result

    def drop(self, dropped: Tensor) -> None:
        """Set per-example gradients to zero where `dropped` is true, after norms are computed."""
        owners, rows, sums = self._summed()
        self.held.clear()
        self._sums = (owners, rows, zero_rows(sums, dropped[owners]))

    def _summed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return example, table row and gradient of every row that an example looked up.

        The gradients of a row that an example looked up several times are added before the norm is
        taken.
        """
        if self._sums is None:
            n, table = len(self.input), self._tables.shape[1]
            indices = self.input.reshape(n, -1).long()
            g = self.output_gradient.reshape(n * indices.shape[1], -1)
            first = torch.arange(n, device=indices.device).unsqueeze(1) * table
            keys, places = torch.unique((indices + first).flatten(), return_inverse=True)
            sums = g.new_zeros(len(keys), g.shape[1]).index_add_(0, places, g)
            owners, rows = keys // table, keys % table
            if self._padding is not None:
                sums = zero_rows(sums, rows == self._padding)
            self._sums = (owners, rows, sums)
        return self._sums


def embedding_rule(recorder: Recorder, module: nn.Embedding, input: Tensor) -> Tensor | None:
    """Layer rule of `nn.Embedding`."""
    if module.max_norm is not None or module.scale_grad_by_freq:
        return None
    return recorder.record(EmbeddingUse(recorder.operand(module.weight), module.padding_idx), input)


def embedding_bag_rule(
    recorder: Recorder,
    module: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor | None:
    """Layer rule of `nn.EmbeddingBag`."""
    if input.ndim != 2 or offsets is not None or per_sample_weights is not None:
        return None
    if module.mode == "max" or module.max_norm is not None or module.scale_grad_by_freq:
        return None
    padding = module.padding_idx
    vectors = recorder.record(EmbeddingUse(recorder.operand(module.weight), padding), input)
    if padding is None:
        return vectors.sum(1) if module.mode == "sum" else vectors.mean(1)
    present = (input != padding).unsqueeze(2)
    total = vectors.masked_fill(~present, 0).sum(1)
    return total if module.mode == "sum" else total / present.sum(1).clamp(min=1)

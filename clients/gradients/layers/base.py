"""Base classes for one call of a layer and the per-example gradients of its parameters.

Gradient norms are float64. They include a bound on the rounding of the sums of gradients that are
released, so that no norm is too small.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

# Most values of a batch's per-example gradients in memory at once: 16 MB in float32. Larger ones of
# linear layers on sequences are computed and dropped block by block, or never computed.
BUDGET = 1 << 22


def zero_rows(values: Tensor, dropped: Tensor) -> Tensor:
    """Return a tensor with some rows set to zero.

    Edge cases: rows that held NaN or infinity become zero too; a product with 0 would leave NaN.

    Args:
        values: the tensor (n, ...).
        dropped: booleans (n,), true for the rows to set to zero.
    """
    rows = dropped.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(rows, 0)


def squares(values: Tensor) -> Tensor:
    """Return upper bounds on the squared L2 norm of each example's values, float64 (n,).

    Edge cases: a row with NaN gives NaN, one with infinity gives infinity or NaN.

    Args:
        values: one row for each example (n, ...).
    """
    return row_norms(_vectors(values)).square_()


def _vectors(values: Tensor) -> Tensor:
    """Return a tensor (n, ...) as n vectors (n, d)."""
    return values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)


def row_norms(values: Tensor) -> Tensor:
    """Return upper bounds on the L2 norms over the last dimension of a tensor, in float64.

    Guarantee: a bound is at least the exact norm, up to float64 rounding. For a row of d float32
    values it exceeds the norm by at most the fraction (min(d, 1024) + 20) 2⁻²⁴, plus 2⁻⁶² √d. It
    depends on that row alone.
    """
    return factor_norms(values)[0]


def factor_norms(*factors: Tensor) -> Tensor:
    """Return, for each of f tensors, upper bounds on its vectors' L2 norms, float64 (f, n, ...).

    The product of an example's bounds is close to the product of the norms. To this end, all norms
    of an example are computed in float64 if one of them is very large.

    Args:
        factors: tensors (n, ..., d) of vectors; d may differ between tensors.
    """
    norms = _bounds(factors)
    if not _are_usual(norms):
        large = ~(norms < _LARGE_NORM).all(0)  # or not a number
        for norm, values in zip(norms, factors, strict=True):
            norm[large] = _double_norms(values[large])
    return norms


def _bounds(factors: Sequence[Tensor]) -> Tensor:
    """Return upper bounds on norms (f, n, ...); useless for very large float32 vectors."""
    sizes = tuple([v.shape[-1] if _is_single(v) else 0 for v in factors])
    norms = torch.stack(list(map(_norms, factors, sizes))).double()
    if any(sizes):
        raised, added = _slack(sizes, norms.ndim)
        norms.mul_(raised).add_(added)
    return norms


def _are_usual(norms: Tensor) -> bool:
    """Return whether squares of float32 vectors with these norms do not overflow by far."""
    return norms.is_cuda or not norms.numel() or norms.max().item() < _LARGE_NORM


@lru_cache(maxsize=64)
def _slack(sizes: tuple[int, ...], dimensions: int) -> tuple[Tensor, Tensor]:
    """Return by which each tensor's norms are raised, as a factor and a term (f, 1, ...).

    Args:
        sizes: number of float32 values of a vector of each tensor; 0 for norms from float64.
        dimensions: number of dimensions of the results.
    """
    shape = (len(sizes), *[1] * (dimensions - 1))
    # Half of γ for the squares of a run, and the errors of roots, in float32.
    raised = [1 + (min(size, _RUN) / 2 + 8) * 2.0**-24 if size else 1.0 for size in sizes]
    added = [_SQUARED_AWAY * math.sqrt(size) for size in sizes]
    both = torch.tensor([raised, added], dtype=torch.float64, device="cpu")
    return both[0].view(shape), both[1].view(shape)


def _is_single(values: Tensor) -> bool:
    return values.dtype == torch.float32 and not values.is_cuda


def _norms(values: Tensor, size: int) -> Tensor:
    """Return the L2 norms over the last dimension; for float32 on the CPU, rounded in float32.

    At most 1024 squares are added in a run in float32, in any order (Higham 2002, section 3.1), and
    the runs in float64. Squares overflow from norms of 2⁶⁴ on.

    Args:
        values: the vectors (n, ..., d).
        size: d for float32 on the CPU; 0 for others.
    """
    if not size:
        return _double_norms(values)
    if size <= _RUN:
        return torch.linalg.vector_norm(values, dim=-1)
    whole = size - size % _RUN
    runs = torch.linalg.vector_norm(values[..., :whole].unflatten(-1, (-1, _RUN)), dim=-1)
    norms = torch.linalg.vector_norm(runs, dim=-1, dtype=torch.float64)
    if whole < size:
        norms.hypot_(torch.linalg.vector_norm(values[..., whole:], dim=-1).double())
    return norms


def _double_norms(values: Tensor) -> Tensor:
    """Return the L2 norms over the last dimension, computed in float64."""
    # torch first converts its whole argument to float64, so a large one is split.
    size = values.numel()
    if size <= BUDGET // 4:
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    rows = max(1, values.shape[0] * (BUDGET // 4) // size)
    parts = [torch.linalg.vector_norm(p, dim=-1, dtype=torch.float64) for p in values.split(rows)]
    return torch.cat(parts)


_RUN = 1024  # squares that are added in a run
_SQUARED_AWAY = 2.0**-63  # root of a square that underflows to 0, also where subnormals are flushed
_LARGE_NORM = 2.0**30


@dataclass(frozen=True)
class Part:
    """Selection of rows from a padded batch of K clients with R rows each.

    Attributes:
        client: index of the client whose rows are selected; None for all clients.
        rows: slice of the R rows of each client that are selected.
        height: most rows of a client in a run. Each run is added up by itself, and then the sums of
            the runs (`SumRounding.height`). None if all rows are one run.
    """

    client: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    height: int | None = None

    def runs(self, rows: int) -> "Sequence[Part]":
        """Return parts of at most `height` successive rows of each client.

        Args:
            rows: number of rows R of each client.
        """
        start, stop, _ = self.rows.indices(rows)
        if self.height is None or stop - start <= self.height:
            return (self,)
        starts = range(start, stop, self.height)
        return [Part(self.client, slice(at, min(at + self.height, stop))) for at in starts]

    def of(self, values: Tensor, clients: int) -> Tensor:
        """Return the selected rows (k, r, ...) of a tensor: r rows of each of k clients.

        Args:
            values: tensor with one row for each row of the padded batch (K · R, ...).
            clients: number of clients K.
        """
        if self.client is None:
            return values.unflatten(0, (clients, -1))[:, self.rows]
        return self.of_client(values, clients).unsqueeze(0)

    def of_client(self, values: Tensor, clients: int) -> Tensor:
        """Return the selected rows (r, ...) of `client` from a tensor of all rows.

        Args:
            values: tensor with one row for each row of the padded batch (K · R, ...).
            clients: number of clients K.
        """
        height = values.shape[0] // clients
        start, stop, _ = self.rows.indices(height)
        first = (self.client or 0) * height
        return values if stop - start == values.shape[0] else values[first + start : first + stop]


WHOLE = Part()


@dataclass(frozen=True)
class Operand:
    """Parameter of a layer, with its values for all clients of a padded batch.

    Attributes:
        values: values of the parameter for each client (K, ...), equal if the parameter is frozen.
        index: index of the parameter; None if the parameter is frozen.
    """

    values: Tensor
    index: int | None

    def reshape(self, *shape: int) -> "Operand":
        """Return the parameter with each client's values in another shape."""
        return Operand(self.values.reshape(len(self.values), *shape), self.index)


class ExampleUse:
    """Per-example gradients of some parameters for the n rows of a padded batch.

    A padded batch has R rows for each of K clients in turn, so n = K · R. This class holds given
    gradients in memory; the subclass `LayerUse` computes them when they are needed.

    Args:
        held: for each parameter index, the per-example gradients (n, *shape).

    Attributes:
        parameters: indices of the trained parameters.
        row_weights: weight of each row (n,), 0 for padding; None if every row may be an example.
    """

    row_weights: Tensor | None = None

    def __init__(self, held: dict[int, Tensor]) -> None:
        self.held = held
        self.parameters = list(held)

    def rows(self, index: int) -> Tensor:
        """Return the per-example gradients (n, ...) of the parameter with the given index.

        The layer may order the values in another way; `in_shape` restores the parameter's order.
        """
        return self.held[index]

    def in_shape(self, rows: Tensor, index: int) -> Tensor:
        """Return gradients in the shape of the parameter (m, *shape).

        Args:
            rows: the gradients (m, ...), with values in the order that the method `rows` returns.
            index: index of the parameter.
        """
        return rows

    def per_example(self, index: int) -> Tensor:
        """Return the per-example gradients (n, *shape) of the parameter with the given index."""
        return self.in_shape(self.rows(index), index)

    def norm_factors(self, index: int) -> tuple[Tensor, ...]:
        """Return tensors (n, d), whose rows' norms multiply to a parameter's gradient norms.

        Args:
            index: index of the parameter.
        """
        return (_vectors(self.rows(index)),)

    def add_weighted(
        self, index: int, factors: Tensor | None, into: Tensor, part: Part = WHOLE
    ) -> None:
        """Add each client's weighted sum of gradients of a parameter to a tensor in place.

        Args:
            index: index of the parameter.
            factors: factor of each row (K, R), of the type of `into`; with None, each factor is 1.
            into: tensor (k, *shape) to which Σ_i factor_i · gradient_i is added; products and sums
                are computed in the type of `into`, or a wider one.
            part: the rows of the padded batch that are added; they belong to k clients.
        """
        clients = len(into) if factors is None else len(factors)
        rows = part.of(self.rows(index), clients)
        rows = rows.reshape(*rows.shape[:2], -1)
        if factors is None:
            total = rows.sum(1, dtype=into.dtype)
        else:
            weights = part.of(factors.flatten(), clients)
            total = weighted_sum(weights.unsqueeze(1), rows).squeeze(1)
        into += self.in_shape(total, index).view(into.shape)

    def add_runs(
        self, index: int, factors: Tensor, into: Tensor, part: Part, *, overwrite: bool
    ) -> None:
        """Add what `add_weighted` adds, in runs of at most `part.height` rows of each client.

        Args:
            index: index of the parameter.
            factors: factor of each row (K, R), of the type of `into`.
            into: tensor (k, *shape) to add to.
            part: the rows of the padded batch that are added; they belong to k clients.
            overwrite: whether the previous content of `into` is dropped.
        """
        if overwrite:
            into.zero_()
        first, *rest = part.runs(factors.shape[1])
        self.add_weighted(index, factors, into, first)
        for run in rest:  # a run has a sum of its own: a product may be added term by term
            total = torch.zeros_like(into)
            self.add_weighted(index, factors, total, run)
            into += total

    def joined_views(self, views: int) -> "ExampleUse":
        """Return the gradient of each example: the sum of the gradients of its augmented views.

        Args:
            views: number of views of each example, in successive rows.
        """
        gradients = {index: self.per_example(index) for index in self.parameters}
        return ExampleUse(
            {i: rows.unflatten(0, (-1, views)).sum(1) for i, rows in gradients.items()}
        )

    def drop(self, dropped: Tensor) -> None:
        """Set the gradients of some rows to zero; call it after the row norms are computed.

        Args:
            dropped: booleans (n,), true for the rows to set to zero.
        """
        self.held = {index: zero_rows(held, dropped) for index, held in self.held.items()}

    def forget(self) -> None:
        """Delete all gradients, to free memory although a user's loss may keep this object."""
        vars(self).clear()


def squared_norms(uses: Mapping[int, ExampleUse]) -> dict[int, Tensor]:
    """Return upper bounds on the squared gradient norms of each parameter, float64 (n,).

    Args:
        uses: for each parameter index, the gradients of n examples.
    """
    factors = {index: use.norm_factors(index) for index, use in uses.items()}
    unique = {id(tensor): tensor for of in factors.values() for tensor in of}
    if not unique:
        return {}
    norms = _bounds(list(unique.values()))
    if not _are_usual(norms):
        return {i: reduce(torch.mul, factor_norms(*of).square_()) for i, of in factors.items()}
    squared = dict(zip(unique, norms.square_(), strict=True))
    return {i: reduce(torch.mul, [squared[id(t)] for t in of]) for i, of in factors.items()}


class LayerUse(ExampleUse, ABC):
    """One call of a layer on a padded batch, with the input and the output gradient of its n rows.

    Per-example gradients are computed when first needed, and then stored.

    Args:
        weight: the layer's weight; None if the layer has no weight.
        bias: the layer's bias; None if the layer has no bias.

    Attributes:
        operand: the weight, or the bias if there is no weight.
        clients: number of clients K.
        weight_index: index of the weight; None if the weight is frozen or absent.
        needs_input: whether the weight is trained, as the weight's gradient needs the input.
        input: input of the layer (n, ...), set by the backward pass if `needs_input` is true.
        output_gradient: gradient at the output (n, ...), set by the backward pass.

    Raises:
        ValueError: the layer has neither weight nor bias.
    """

    def __init__(self, weight: Operand | None, bias: Operand | None = None) -> None:
        super().__init__({})
        self.weight, self.bias = weight, bias
        first = weight or bias
        if first is None:
            raise ValueError("a layer use needs a weight or a bias, got neither")
        self.operand, self.clients = first, len(first.values)
        self.weight_index = None if weight is None else weight.index
        self.needs_input = self.weight_index is not None
        indices = (self.weight_index, None if bias is None else bias.index)
        self.parameters = [index for index in indices if index is not None]
        self.input: Tensor = _NOTHING
        self.output_gradient: Tensor = _NOTHING

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, ...) for the input x (n, ...)."""

    @abstractmethod
    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the layer's input, given the gradient g at its output."""

    @abstractmethod
    def compute(self, index: int) -> Tensor:
        """Compute the per-example gradients (n, ...) of the parameter with the given index."""

    def rows(self, index: int) -> Tensor:
        """Return the per-example gradients (n, ...) of the parameter with the given index.

        The layer may order the values in another way; `in_shape` restores the parameter's order.
        """
        if index not in self.held:
            self.held[index] = self.compute(index)
        return self.held[index]

    def drop(self, dropped: Tensor) -> None:
        """Set per-example gradients to zero where `dropped` is true, after norms are computed."""
        super().drop(dropped)
        if len(self.held) == len(self.parameters):  # sums use the held gradients alone
            return
        self.output_gradient = zero_rows(self.output_gradient, dropped)
        if self.needs_input and self.input.is_floating_point():
            self.input = zero_rows(self.input, dropped)

    def by_client(self, values: Tensor) -> Tensor:
        """Return a tensor (n, ..., d) reshaped to (K, m, d), one matrix for each of K clients."""
        return values.reshape(self.clients, -1, values.shape[-1])


class Recorder(Protocol):
    """Protocol of the object with which a layer rule records layer calls."""

    def operand(self, parameter: Tensor) -> Operand:
        """Return a parameter with its values for all clients of the padded batch."""
        ...

    def record(self, use: LayerUse, x: Tensor) -> Tensor:
        """Return the output of a layer call, and record the call.

        Args:
            use: the layer call, with the layer's parameters.
            x: input of the layer (n, ...), one row per example.
        """
        ...


Rule = Callable[..., Any]
"""Function of a recorder, a module and its arguments that returns the module's output.

It returns None for a call that it does not cover.
"""


def optional_operand(recorder: Recorder, parameter: Tensor | None) -> Operand | None:
    """Return a parameter with its values for all clients; None for a parameter that is None."""
    return None if parameter is None else recorder.operand(parameter)


def row_products(
    rows: Tensor, matrix: Tensor, shift: Tensor | None = None, *, into: Tensor | None = None
) -> Tensor:
    """Return each client's matrix product plus a shift: rows_k · matrix_k + shift_k, (K, m, n).

    Guarantee: a row's result does not depend on its position. For few columns, libraries have
    kernels whose sums depend on a row's position in memory, so the product has at least 16 columns.

    Args:
        rows: left factors (K, m, k).
        matrix: right factors (K, k, n).
        shift: terms (K, n) to add; None to add nothing.
        into: tensor (K, m, n) that gets the result; None for a new one.
    """
    shift = None if shift is None else shift.unsqueeze(1)
    missing = _FEWEST_COLUMNS - matrix.shape[2]
    if missing > 0:
        result = torch.bmm(rows, functional.pad(matrix, (0, missing)))[..., :-missing]
        if shift is not None:
            return torch.add(result, shift.to(result.dtype), out=into)  # short under autocast
        return result.contiguous() if into is None else into.copy_(result)
    if shift is None:
        return torch.bmm(rows, matrix, out=into)
    return torch.baddbmm(shift, rows, matrix, out=into)


def weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """Return each client's weighted sum of rows (K, 1, d), in the type of the factors.

    Args:
        factors: factors of m rows of each of K clients (K, 1, m).
        rows: rows (K, m, d) of any type; they are converted in parts that fit into the cache.
    """
    if rows.dtype == factors.dtype:
        return torch.bmm(factors, rows)
    size = max(1, _CACHE_VALUES // max(1, rows.shape[0] * rows.shape[2]))
    total = factors.new_zeros(rows.shape[0], 1, rows.shape[2])
    for start in range(0, rows.shape[1], size):
        part = rows[:, start : start + size].to(factors.dtype)
        total.baddbmm_(factors[..., start : start + size], part)
    return total


_CACHE_VALUES = 1 << 16
_FEWEST_COLUMNS = 16
ROW_MULTIPLE = 8
"""The number of rows of a product is a multiple of it.

With another number of rows, libraries compute the last rows of a matrix product in another way. The
last bits of a row would then depend on the position of the row.
"""
_NOTHING = torch.empty(0)  # before the backward pass

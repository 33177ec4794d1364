"""The rule of a layer: what one call of it must know about its parameters' gradients.

Norms are in float64 and never too small, with what rounding may add to a sum.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

# Values of a lot's per-example gradients that are held at once: 16 MB in float32. Larger gradients
# of linear layers on sequences are made and dropped block by block, or never made.
BUDGET = 1 << 22


def zero_rows(values: Tensor, dropped: Tensor) -> Tensor:
    """Return values (n, ...) with the rows of dropped examples (n,) set to zero.

    Edge cases: a dropped row may hold NaN or infinity; multiplying it by 0 would leave NaN.
    """
    rows = dropped.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(rows, 0)


def squares(values: Tensor) -> Tensor:
    """Squared norm of each example's values (n, ...), float64.

    Guarantee: never below the exact squared norm by more than float64 rounding.

    Edge cases: a row with NaN gives NaN, one with infinity gives infinity or NaN.
    """
    rows = values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
    return row_norms(rows).square_()


def row_norms(values: Tensor) -> Tensor:
    """Return the norms over the last dimension, float64."""
    # torch converts its whole argument first, so large ones go in parts.
    size = values.numel()
    if size <= BUDGET // 4:
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    each = max(1, values.shape[0] * (BUDGET // 4) // size)
    parts = [torch.linalg.vector_norm(p, dim=-1, dtype=torch.float64) for p in values.split(each)]
    return torch.cat(parts)


def unit_roundoff(values: Tensor) -> float:
    """Return the relative error of one product in a matrix product of such values."""
    if values.is_cuda and values.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-11
    return torch.finfo(values.dtype).eps / 2


def with_rounding(squared: Tensor, absolute: Tensor, error: float, terms: float) -> Tensor:
    """Return squared norms that also cover what rounding may add to the sums that are released.

    Args:
        squared: squared norms (n,) of sums of terms, computed in float64.
        absolute: (n,) bounds on the sums of the norms of the terms.
        error: relative to `absolute` squared, the rounding error of `squared` itself.
        terms: relative to `absolute`, the rounding error of the released sums.
    """
    exact = (squared + error * absolute.square()).clamp_(min=0).sqrt_()
    return (exact + terms * absolute).square_()


@dataclass(frozen=True)
class Part:
    """Some rows of a tile of K clients, R rows each.

    Attributes:
        client: whose rows; None: those of all clients.
        rows: which of the R rows of each.
    """

    client: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, values: Tensor, clients: int) -> Tensor:
        """Return the part (k, r, ...) of values (K · R, ...)."""
        height = len(values) // clients
        start, stop, _ = self.rows.indices(height)
        if self.client is None:
            return values.unflatten(0, (clients, height))[:, start:stop]
        first = self.client * height
        return values[first + start : first + stop].unsqueeze(0)


WHOLE = Part()


@dataclass(frozen=True)
class Operand:
    """A parameter of a layer for all clients of a tile.

    Attributes:
        values: (K, ...), the value of each client; frozen ones are the same for all.
        index: of the parameter; None where it is frozen.
    """

    values: Tensor
    index: int | None

    def reshape(self, *shape: int) -> "Operand":
        """Return the parameter with another shape of each client's value."""
        return Operand(self.values.reshape(len(self.values), *shape), self.index)


class ExampleUse:
    """The gradients of all rows of a tile with respect to some parameters: here, held as given.

    A tile has n = K · R rows, R of each client in turn.

    Args:
        held: gradients (n, *shape) by index of the parameter.

    Attributes:
        parameters: indices of the trained parameters.
    """

    def __init__(self, held: dict[int, Tensor]) -> None:
        self.held = held
        self.parameters = list(held)

    def rows(self, index: int) -> Tensor:
        """Return the gradient of each row (n, ...), its values in any order."""
        return self.held[index]

    def in_shape(self, rows: Tensor, index: int) -> Tensor:
        """Return (m, ...) in the order of `rows` as (m, *shape)."""
        return rows

    def per_example(self, index: int) -> Tensor:
        """Return the gradient of each row (n, *shape) with respect to one parameter."""
        return self.in_shape(self.rows(index), index)

    def squared_norms(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        return squares(self.rows(index))

    def add_weighted(
        self, index: int, factors: Tensor | None, into: Tensor, part: Part = WHOLE
    ) -> None:
        """Add Σ_i factor_i · gradient_i of each client's rows in a part to `into`.

        Args:
            index: of the parameter.
            factors: (K, R), of the type of `into`; None: 1 for all rows.
            into: (k, *shape); products and sums have its type, or a wider one.
            part: of the tile, with k clients.
        """
        clients = len(into) if factors is None else len(factors)
        rows = part.of(self.rows(index), clients)
        rows = rows.reshape(*rows.shape[:2], -1)
        if factors is None:
            total = rows.sum(1, dtype=into.dtype)
        else:
            own = part.of(factors.flatten(), clients)
            total = weighted_sum(own.unsqueeze(1), rows).squeeze(1)
        into += self.in_shape(total, index).view(into.shape)

    def joined_views(self, views: int) -> "ExampleUse":
        """Return the use with `views` rows side by side as one row: their gradients are added."""
        found = {index: self.per_example(index) for index in self.parameters}
        return ExampleUse({i: rows.unflatten(0, (-1, views)).sum(1) for i, rows in found.items()})

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""
        self.held = {index: zero_rows(held, dropped) for index, held in self.held.items()}

    def forget(self) -> None:
        """Drop all that is held, at the end of the use; the graph of a user's loss may hold it."""
        vars(self).clear()


class LayerUse(ExampleUse, ABC):
    """One call of a layer on a tile, filled in by a forward pass and a backward pass.

    Gradients that are asked for are computed once and held.

    Args:
        weight: its weight; None where it has none.
        bias: its bias; None where it has none.

    Attributes:
        operand: the weight, or the bias where there is none.
        clients: number of clients K.
        weight_index: of the weight where it is trained.
        needs_input: whether gradients need the input: where only a bias is trained, none is kept.
        input: (n, ...), set by the backward pass where `needs_input`.
        output_gradient: (n, ...), set by the backward pass.

    Raises:
        ValueError: the layer has neither.
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
        """Return the layer's output (n, ...)."""

    @abstractmethod
    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the input, given that at the output."""

    @abstractmethod
    def compute(self, index: int) -> Tensor:
        """Return the gradients of the rows, as `rows` holds them."""

    def rows(self, index: int) -> Tensor:
        """Return the gradient of each row (n, ...), its values in any order."""
        if index not in self.held:
            self.held[index] = self.compute(index)
        return self.held[index]

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""
        super().drop(dropped)
        if len(self.held) == len(self.parameters):  # all that will be added
            return
        self.output_gradient = zero_rows(self.output_gradient, dropped)
        if self.needs_input and self.input.is_floating_point():
            self.input = zero_rows(self.input, dropped)

    def by_client(self, values: Tensor) -> Tensor:
        """Return (n, ..., d) as (K, n / K · ..., d)."""
        return values.reshape(self.clients, -1, values.shape[-1])


def row_products(rows: Tensor, matrix: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return rows_k · matrix_k, plus shift_k, of each client (K, m, n).

    Guarantee: a row's result does not depend on its place. Where there are few columns, libraries
    have kernels that sum a row by how it lies in memory, so there are never fewer than 16.

    Args:
        rows: (K, m, k).
        matrix: (K, k, n).
        shift: (K, n); None: nothing is added.
    """
    columns, shift = matrix.shape[2], None if shift is None else shift.unsqueeze(1)
    missing = _FEWEST_COLUMNS - columns
    if missing > 0:
        matrix = functional.pad(matrix, (0, missing))
        shift = None if shift is None else functional.pad(shift, (0, missing))
    found = torch.bmm(rows, matrix) if shift is None else torch.baddbmm(shift, rows, matrix)
    return found[..., :columns].contiguous() if missing > 0 else found


def weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_i factor_i · row_i of each client, in the type of the factors.

    Args:
        factors: (K, 1, m).
        rows: (K, m, d), of any type; converted part by part, so that a part stays in the cache.
    """
    if rows.dtype == factors.dtype:
        return torch.bmm(factors, rows)
    each = max(1, _CACHE_VALUES // (rows.shape[0] * rows.shape[2]))
    total = factors.new_zeros(rows.shape[0], 1, rows.shape[2])
    for start in range(0, rows.shape[1], each):
        part = rows[:, start : start + each].to(factors.dtype)
        total.baddbmm_(factors[..., start : start + each], part)
    return total


def add_outer(left: Tensor, right: Tensor, into: Tensor, *, whole: bool) -> None:
    """Add left_kᵀ · right_k of each client to `into` (K, a, b), in its type.

    Args:
        left: (K, m, a).
        right: (K, m, b).
        into: (K, a, b).
        whole: whether the product is computed in float64 before it is added. With many rows for an
            example, as of sequences, `into` would otherwise be rounded once for each of them.
    """
    kind = torch.float64 if whole else into.dtype
    left, right = left.to(kind), right.to(kind)
    if len(into) == 1 and not whole:
        into[0].addmm_(left[0].t(), right[0])
    elif into.shape[1:].numel() >= _LARGE and not whole:  # one after the other, where they lie
        into.baddbmm_(left.transpose(1, 2), right)
    else:  # in one call, which needs a result without gaps
        into += torch.bmm(left.transpose(1, 2), right)


_LARGE = 1 << 13
_CACHE_VALUES = 1 << 16
_FEWEST_COLUMNS = 16
_NOTHING = torch.empty(0)  # before the backward pass

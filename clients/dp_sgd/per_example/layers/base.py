"""The rule of a layer: what one call of it must know about its parameters' gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.norms import squares, zero_rows


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


class ExampleUse(ABC):
    """The gradients of all rows of a tile with respect to the parameters of one call.

    A tile has n = K · R rows, R of each client in turn.
    """

    @property
    @abstractmethod
    def parameters(self) -> list[int]:
        """Indices of the trained parameters."""

    @abstractmethod
    def per_example(self, index: int) -> Tensor:
        """Return the gradient of each row (n, *shape) with respect to one parameter."""

    @abstractmethod
    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""

    def squared_norms(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        return squares(self.per_example(index))

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i of each client's rows to `into` (K, *shape)."""
        add_rows(self.per_example(index), factors, into)

    def add_sum(self, index: int, into: Tensor) -> None:
        """Add Σ_i gradient_i of each client's rows to `into` (K, *shape)."""
        rows = self.per_example(index)
        into += rows.reshape(len(into), -1, *into.shape[1:]).sum(1)

    def forget(self) -> None:
        """Drop all that is held, at the end of the use; the graph of a user's loss may hold it."""
        vars(self).clear()


class LayerUse(ExampleUse):
    """One call of a layer on a tile, filled in by a forward pass and a backward pass.

    Args:
        weight: its weight; None where it has none.
        bias: its bias; None where it has none.

    Attributes:
        input: (n, ...), set by the backward pass where `needs_input`.
        output_gradient: (n, ...), set by the backward pass.
    """

    def __init__(self, weight: Operand | None, bias: Operand | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.input: Tensor = _NOTHING
        self.output_gradient: Tensor = _NOTHING

    @property
    def weight_index(self) -> int | None:
        """Index of the weight where it is trained."""
        return None if self.weight is None else self.weight.index

    @property
    def parameters(self) -> list[int]:
        """Indices of the trained parameters."""
        indices = [None if p is None else p.index for p in (self.weight, self.bias)]
        return [index for index in indices if index is not None]

    @property
    def clients(self) -> int:
        """Number of clients K."""
        return (self.weight or self.bias or _NO_OPERAND).values.shape[0]

    @property
    def needs_input(self) -> bool:
        """Whether gradients need the input: where only a bias is trained, nothing is kept."""
        return self.weight_index is not None

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, ...)."""

    @abstractmethod
    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the input, given that at the output."""

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""
        self.output_gradient = zero_rows(self.output_gradient, dropped)
        if self.needs_input and self.input.is_floating_point():
            self.input = zero_rows(self.input, dropped)

    def by_client(self, values: Tensor) -> Tensor:
        """Return (n, ..., d) as (K, n / K · ..., d)."""
        return values.reshape(self.clients, -1, values.shape[-1])


class HeldUse(LayerUse):
    """A use that holds the gradient of each row; norms are measured on what is held."""

    def __init__(self, weight: Operand | None, bias: Operand | None = None) -> None:
        super().__init__(weight, bias)
        self._held: dict[int, Tensor] = {}

    @abstractmethod
    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of one parameter."""

    def per_example(self, index: int) -> Tensor:
        """Return the gradient of each row (n, *shape) with respect to one parameter."""
        if index not in self._held:
            self._held[index] = self.compute(index)
        return self._held[index]

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero; called after the norms."""
        super().drop(dropped)
        self._held = {index: zero_rows(held, dropped) for index, held in self._held.items()}


class SummedUses:
    """Several uses of one parameter: the norm of a sum needs the sum itself.

    Args:
        uses: filled in.
        index: of the parameter.
    """

    def __init__(self, uses: Sequence[ExampleUse], index: int) -> None:
        self._sum = sum((use.per_example(index) for use in uses[1:]), uses[0].per_example(index))

    def squared_norms(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,)."""
        return squares(self._sum)

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i of each client's rows to `into` (K, *shape)."""
        add_rows(self._sum, factors, into)

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (n,) zero."""
        self._sum = zero_rows(self._sum, dropped)


def add_rows(gradients: Tensor, factors: Tensor, into: Tensor) -> None:
    """Add Σ_i factor_i · gradients_i (n, *shape) of each client's rows to `into` (K, *shape)."""
    clients = into.shape[0]
    rows = gradients.reshape(clients, -1, into.shape[1:].numel())
    into += torch.bmm(factors.view(clients, 1, -1), rows).view(into.shape)


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


def add_outer(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Add left_kᵀ · right_k of each client to `into` (K, a, b).

    Args:
        left: (K, m, a).
        right: (K, m, b).
        into: (K, a, b).
    """
    if into.shape[1:].numel() >= _LARGE:  # one product after the other, where they lie
        into.baddbmm_(left.transpose(1, 2), right)
    else:  # in one call, which needs a result without gaps
        into += torch.bmm(left.transpose(1, 2), right)


_LARGE = 1 << 13
_FEWEST_COLUMNS = 16
_NOTHING = torch.empty(0)  # before the backward pass
_NO_OPERAND = Operand(_NOTHING, None)

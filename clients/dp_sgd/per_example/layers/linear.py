"""Linear layers: norms without ever holding (examples x weights) of a large one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.layers.base import ALL, Use, add_rows
from fedsim.clients.dp_sgd.per_example.layers.norms import (
    BUDGET,
    row_norms,
    squares,
    unit_roundoff,
    with_rounding,
    without,
)
from fedsim.clients.dp_sgd.per_example.products import add_product, affine, product

_ROWS = 512  # in one product: the fewer, the smaller its rounding error


class LinearUse(Use):
    """x Wᵀ + b on vectors (n, in) or sequences (n, ..., in).

    On vectors the norm of g aᵀ is the product of the norms. On sequences the gradient Σ_t g_t a_tᵀ
    is held where that is little for all examples together; else its squared norm is
    Σ_st (a_s·a_t)(g_s·g_t) where sequences are short, or a sum over blocks of its rows, both in
    float64 and with the rounding of the product that is released.
    """

    def __init__(self, weight: int | None, bias: int | None, w: Tensor, b: Tensor | None) -> None:
        super().__init__(weight, bias, w, b)
        self._w = w
        self._scaled: tuple[Tensor, Tensor] | None = None
        self._g_squares: Tensor | None = None
        self._sequences: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def joined(uses: Sequence["LinearUse"]) -> "LinearUse":
        """Return uses of the same parameters as one: their sequences one after the other."""
        first = uses[0]
        use = LinearUse(first.weight, first.bias, first._w, first.b)
        use.output_gradient = torch.cat(
            [part._rows_of(part.output_gradient) for part in uses], dim=1
        )
        if first.needs_input:
            use.input = torch.cat([part._rows_of(part.input) for part in uses], dim=1)
        return use

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return affine(x, self._w, self.b)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape may be read."""
        return product(g, self._w)

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        if not self._single:
            if index == self.bias or self._little:
                return squares(self.gradients_of(index))
            return _sequence_squares(*self._pair())
        if index == self.bias:
            return self._squares_of_g()
        result = squares(self.input) * self._squares_of_g()
        coarse = unit_roundoff(self.output_gradient)
        # Below float32, one rounded product may be longer than the room that clipping leaves.
        return result.mul_((1 + 4 * coarse) ** 2) if coarse > 1e-7 else result

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""
        held = self._held.get(index)
        if held is not None:
            add_rows(held, factors, into)
            return
        if self._single:
            g = self.scaled_by(factors)
            if index == self.bias:
                into.add_(g.sum(0))
            else:
                add_product(into, g.t(), _flat(self.input))
            return
        a, g = self._pair()
        scaled = (g * factors[:, None, None]).flatten(0, 1)
        parts = zip(scaled.split(_ROWS), a.flatten(0, 1).split(_ROWS), strict=True)
        for part_g, part_a in parts:
            add_product(into, part_g.t(), part_a)

    def sum_of(self, index: int) -> Tensor:
        """Return Σ_i gradient_i, as a backward pass of torch does."""
        g = self.output_gradient.flatten(0, -2)
        return g.sum(0) if index == self.bias else product(g.t(), self.input.flatten(0, -2))

    @property
    def on_vectors(self) -> bool:
        """Whether each example is one vector, so that no gradient of one is ever held."""
        return self._single

    def gradients_of(self, index: int, rows: slice = ALL) -> Tensor:
        """Return the gradients (n, *shape), or some rows of each: (n, rows, *shape[1:])."""
        if index in self._held:
            return self._held[index][:, rows]
        g = self._rows_of(self.output_gradient)[:, :, rows]
        result = g.sum(1) if index == self.bias else g.transpose(1, 2) @ self._rows_of(self.input)
        if rows == ALL:
            self._held[index] = result
        return result

    def rounding_of(self, index: int) -> Tensor:
        """Return (n,), float64: at most so much may rounding add to what is added."""
        if index == self.bias:
            absolute = row_norms(self._rows_of(self.output_gradient)).sum(1)
        else:
            absolute = _absolute(*self._pair())
        return absolute * _relative_rounding(self._rows_of(self.output_gradient))

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        super().drop(dropped)
        self._sequences = self._scaled = None
        self._held = {index: without(held, dropped) for index, held in self._held.items()}

    @property
    def _single(self) -> bool:
        """Whether each example is one vector."""
        shape = self.output_gradient.shape
        return len(shape) == 2 or shape[1:-1].numel() == 1

    @property
    def _little(self) -> bool:
        """Whether the gradients of all examples may be held."""
        return self.output_gradient.shape[0] * self._w.numel() <= BUDGET

    def scaled_by(self, factors: Tensor) -> Tensor:
        """Return factor_i · g_i (n, out), computed once for weight and bias."""
        if self._scaled is None or self._scaled[0] is not factors:
            scaled = _flat(self.output_gradient) * factors.unsqueeze(1)
            self._scaled = factors, scaled
        return self._scaled[1]

    def _squares_of_g(self) -> Tensor:
        if self._g_squares is None:
            self._g_squares = squares(self.output_gradient)
        return self._g_squares

    def _pair(self) -> tuple[Tensor, Tensor]:
        if self._sequences is None:
            self._sequences = (self._rows_of(self.input), self._rows_of(self.output_gradient))
        return self._sequences

    def _rows_of(self, values: Tensor) -> Tensor:
        """Return (n, ..., d) as (n, t, d)."""
        if values.ndim == 3:
            return values
        return values.reshape(len(values), values.shape[1:-1].numel(), values.shape[-1])


def _flat(values: Tensor) -> Tensor:
    return values if values.ndim == 2 else values.flatten(1)


def _relative_rounding(g: Tensor) -> float:
    """Bound the rounding of the products added, relative to the sum of the norms of the terms.

    A term is scaled by its factor, multiplied, added to at most all other terms of its product, and
    their sum to those of the other products: so many roundings, each by the unit roundoff.
    """
    rows = g.shape[0] * g.shape[1]
    return (min(rows, _ROWS) + rows // _ROWS + 4) * unit_roundoff(g)


def _absolute(a: Tensor, g: Tensor) -> Tensor:
    """Return Σ_t |g_t| |a_t| of sequences (n, t, ...), float64 (n,)."""
    return (row_norms(a) * row_norms(g)).sum(1)


def _sequence_squares(a: Tensor, g: Tensor) -> Tensor:
    """Squared norms of Σ_t g_t a_tᵀ for sequences a (n, t, d) and g (n, t, p), never too small."""
    length, released = a.shape[1], _relative_rounding(g)
    if _is_short(a, g):
        # A sum of t² products of two sums of d and p products: Higham's γ of all of them.
        terms = length * length + a.shape[2] + g.shape[2] + 4
        error = terms * torch.finfo(torch.float64).eps
        return with_rounding(_gram_squares(a, g), _absolute(a, g), error, released)
    measured = (length + 1) * unit_roundoff(g)
    return with_rounding(_blockwise_squares(a, g), _absolute(a, g), 0.0, released + measured)


def _is_short(a: Tensor, g: Tensor) -> bool:
    """Tell whether (t x t) inner products are less work than the gradient (Bu et al. 2023)."""
    return 2 * a.shape[1] ** 2 <= a.shape[2] * g.shape[2]


def _gram_squares(a: Tensor, g: Tensor) -> Tensor:
    """As `_sequence_squares` for short sequences, up to rounding: the terms may cancel."""
    n, length, d = a.shape
    block = max(1, BUDGET // (4 * length * (d + g.shape[2] + length)))
    total = a.new_zeros(n, dtype=torch.float64)
    for start in range(0, n, block):
        part_a, part_g = a[start : start + block].double(), g[start : start + block].double()
        gram = (part_a @ part_a.transpose(1, 2)).mul_(part_g @ part_g.transpose(1, 2))
        total[start : start + block] = gram.sum((1, 2))
    return total


def _blockwise_squares(a: Tensor, g: Tensor) -> Tensor:
    """As `_sequence_squares` for long sequences: gradients made and dropped block by block."""
    n, _, d = a.shape
    block = max(1, BUDGET // (n * d))
    total = a.new_zeros(n, dtype=torch.float64)
    for part in g.split(block, dim=2):
        total += squares(part.transpose(1, 2) @ a)
    return total

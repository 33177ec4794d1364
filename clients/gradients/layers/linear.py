"""Per-example gradient norms and sums of linear layers, without all gradients in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import (
    BUDGET,
    WHOLE,
    LayerUse,
    Operand,
    Part,
    Recorder,
    optional_operand,
    row_norms,
    row_products,
    squares,
)


class LinearUse(LayerUse):
    """One call of a linear layer x Wᵀ + b, on vectors (n, in) or sequences (n, ..., in).

    Let a be the input for an example, and g the gradient at the output. On vectors, the gradient of
    W is g aᵀ, with norm ‖g‖ ‖a‖. On sequences with positions t, the gradient is Σ_t g_t a_tᵀ. It is
    held in memory if the gradients of all examples together have at most `BUDGET` values. Otherwise
    its squared norm is computed as Σ_st (a_s·a_t)(g_s·g_t) for short sequences, and from a few rows
    of the gradient at a time for long ones. A bound on all rounding errors is added.

    Source: Goodfellow 2015, "Efficient Per-Example Gradient Computations"; Bu et al. 2023,
    "Differentially Private Optimization on Large Model at Small Cost".
    """

    def __init__(self, weight: Operand, bias: Operand | None) -> None:
        super().__init__(weight, bias)
        self._scaled: tuple[Tensor | None, torch.dtype, Tensor] | None = None

    @staticmethod
    def joined(uses: Sequence["LinearUse"]) -> "LinearUse":
        """Return several calls of one layer as a single call on longer sequences."""
        first = uses[0]
        use = LinearUse(first.operand, first.bias)
        use.output_gradient = torch.cat([_sequences(part.output_gradient) for part in uses], 1)
        if first.needs_input:
            use.input = torch.cat([_sequences(part.input) for part in uses], 1)
        return use

    def joined_views(self, views: int) -> "LinearUse":
        """Return this call with one row per example, which joins the sequences of its views."""
        use = LinearUse(self.operand, self.bias)
        use.output_gradient = _sequences(self.output_gradient.unflatten(0, (-1, views)))
        if self.needs_input:
            use.input = _sequences(self.input.unflatten(0, (-1, views)))
        return use

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, ...) for the input x (n, ...)."""
        w = self.operand.values.transpose(1, 2)
        shift = None if self.bias is None else self.bias.values
        y = row_products(self.by_client(x), w, shift)
        return y.view(*x.shape[:-1], w.shape[2])

    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the layer's input, given the gradient g at its output."""
        w = self.operand.values
        return row_products(self.by_client(g), w).view(*g.shape[:-1], w.shape[2])

    def norm_factors(self, index: int) -> tuple[Tensor, ...]:
        """Return tensors (n, d), whose rows' norms multiply to a parameter's gradient norms."""
        is_weight = index == self.weight_index
        if self._single:
            g = self.output_gradient.flatten(1)
            return (g, self.input.flatten(1)) if is_weight else (g,)
        if not is_weight or self._is_little:
            return super().norm_factors(index)
        squared = _sequence_squares(_sequences(self.input), _sequences(self.output_gradient))
        return (squared.sqrt_().unsqueeze(1),)

    def add_weighted(
        self, index: int, factors: Tensor | None, into: Tensor, part: Part = WHOLE
    ) -> None:
        """Add each client's weighted sum of gradients of a parameter to a tensor in place."""
        if index in self.held:
            super().add_weighted(index, factors, into, part)
            return
        # Sequences are added in float64: the bounds on their norms include its rounding.
        kind = into.dtype if self._single else torch.float64
        scaled = part.of(self._scaled_by(factors, kind), self.clients).flatten(1, -2)
        if index == self.weight_index:
            x = part.of(self.input, self.clients).flatten(1, -2)
            _add_outer(scaled, x, into, whole=not self._single)
        else:
            into += scaled.sum(1)

    def add_runs(
        self, index: int, factors: Tensor, into: Tensor, part: Part, *, overwrite: bool
    ) -> None:
        """Add what `add_weighted` adds, in runs of at most `part.height` rows of each client."""
        if not self._single or part.client is None or index in self.held:
            super().add_runs(index, factors, into, part, overwrite=overwrite)
            return
        sums, g = into[0], part.of_client(self._scaled_by(factors, into.dtype), self.clients)
        height = part.height or max(1, len(g))
        if index != self.weight_index:
            if overwrite and len(g) <= height:
                torch.sum(g, 0, out=sums)
            else:  # in float64, as the order of these additions is not that of runs
                total = g.sum(0, dtype=torch.float64)
                sums.copy_(total) if overwrite else sums.add_(total)
            return
        x = part.of_client(self.input.flatten(1), self.clients).to(into.dtype)
        torch.addmm(sums, g[:height].t(), x[:height], beta=0 if overwrite else 1, out=sums)
        for start in range(height, len(g), height):
            run = slice(start, start + height)
            sums += g[run].t() @ x[run]  # a sum of its own: `addmm` may add term by term

    def _scaled_by(self, factors: Tensor | None, kind: torch.dtype) -> Tensor:
        """Return the output gradients times the factors of their rows, once for all parameters."""
        known = self._scaled
        if known is None or known[0] is not factors or known[1] != kind:
            g = self.output_gradient.to(kind)
            g = g.flatten(1) if self._single else g
            if factors is not None:
                g = g * factors.to(kind).view(-1, *[1] * (g.ndim - 1))
            known = self._scaled = factors, kind, g
        return known[2]

    def compute(self, index: int) -> Tensor:
        """Compute the per-example gradients (n, *shape) of the parameter with the given index."""
        g = _sequences(self.output_gradient)
        if index == self.weight_index:
            return row_products(g.transpose(1, 2), _sequences(self.input))
        return g.sum(1)

    @property
    def _single(self) -> bool:
        """Whether each example is one vector."""
        g = self.output_gradient
        return g.ndim == 2 or g.shape[1:-1].numel() == 1

    @property
    def _is_little(self) -> bool:
        """Whether the gradients of all examples are small enough to hold."""
        return len(self.output_gradient) * self.operand.values[0].numel() <= BUDGET


def _sequences(values: Tensor) -> Tensor:
    """Return a tensor (n, ..., d) as sequences (n, t, d)."""
    return values.reshape(len(values), values.shape[1:-1].numel(), values.shape[-1])


def _add_outer(left: Tensor, right: Tensor, into: Tensor, *, whole: bool) -> None:
    """Add each client's matrix product left_kᵀ · right_k to a tensor in place.

    Args:
        left: left factors of K clients (K, m, a).
        right: right factors (K, m, b).
        into: tensor (K, a, b) to add to.
        whole: whether the product is computed in float64 and then added. Otherwise each of the m
            rows is added to `into` with a rounding error, which is too much for long sequences.
    """
    kind = torch.float64 if whole else into.dtype
    left, right = left.to(kind), right.to(kind)
    if into.shape[1:].numel() >= _LARGE_SUM and not whole:  # client by client, in place
        into.baddbmm_(left.transpose(1, 2), right)
    else:  # in one call, which needs a contiguous result
        into += torch.bmm(left.transpose(1, 2), right)


_LARGE_SUM = 1 << 13  # values of a client's sum


def _unit_roundoff(values: Tensor) -> float:
    """Return the unit roundoff of matrix products with a tensor of this dtype and device."""
    if values.is_cuda and values.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-11
    return torch.finfo(values.dtype).eps / 2


def _with_rounding(squared: Tensor, absolute: Tensor, error: float, terms: float) -> Tensor:
    """Return upper bounds (n,) on the squared norms of n computed sums, rounding included.

    Args:
        squared: squared norm of each exact sum (n,), computed in float64.
        absolute: for each sum, an upper bound on the total of the norms of its terms (n,).
        error: rounding error in `squared`, as a fraction of the square of `absolute`.
        terms: rounding error in the computed sums, as a fraction of `absolute`.
    """
    exact = (squared + error * absolute.square()).clamp_(min=0).sqrt_()
    return (exact + terms * absolute).square_()


def _relative_rounding(a: Tensor) -> float:
    """Return a bound on the rounding of a sum of products, relative to the sum of the terms' norms.

    A term is scaled by its factor, multiplied, and added to at most all other terms, in float64.
    """
    return (a.shape[0] * a.shape[1] + 4) * torch.finfo(torch.float64).eps


def _sequence_squares(a: Tensor, g: Tensor) -> Tensor:
    """Return upper bounds on the squared norms of Σ_t g_t a_tᵀ, for a (n, t, d) and g (n, t, p)."""
    length, released = a.shape[1], _relative_rounding(g)
    absolute = (row_norms(a) * row_norms(g)).sum(1)  # Σ_t |g_t| |a_t|
    if _is_short(a, g):
        # A sum of t² products of two sums of d and p products: Higham's γ of all of them.
        terms = length * length + a.shape[2] + g.shape[2] + 4
        error = terms * torch.finfo(torch.float64).eps
        return _with_rounding(_gram_squares(a, g), absolute, error, released)
    measured = (length + 1) * _unit_roundoff(g)
    return _with_rounding(_blockwise_squares(a, g), absolute, 0.0, released + measured)


def _is_short(a: Tensor, g: Tensor) -> bool:
    """Return whether (t x t) inner products cost less than the gradient (Bu et al. 2023)."""
    return 2 * a.shape[1] ** 2 <= a.shape[2] * g.shape[2]


def _gram_squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the squared norms for short sequences, up to rounding, since terms may cancel."""
    n, length, d = a.shape
    block = max(1, BUDGET // (4 * length * (d + g.shape[2] + length)))
    total = a.new_zeros(n, dtype=torch.float64)
    for start in range(0, n, block):
        part_a, part_g = a[start : start + block].double(), g[start : start + block].double()
        gram = row_products(part_a, part_a.transpose(1, 2))
        gram.mul_(row_products(part_g, part_g.transpose(1, 2)))
        total[start : start + block] = gram.sum((1, 2))
    return total


def _blockwise_squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the squared norms for long sequences, up to rounding, by blocks of the gradients."""
    n, _, d = a.shape
    block = max(1, BUDGET // (n * d))
    total = a.new_zeros(n, dtype=torch.float64)
    for part in g.split(block, dim=2):
        total += squares(row_products(part.transpose(1, 2), a))
    return total


def linear_rule(recorder: Recorder, module: nn.Linear, input: Tensor) -> Tensor:
    """Layer rule of `nn.Linear`."""
    use = LinearUse(recorder.operand(module.weight), optional_operand(recorder, module.bias))
    return recorder.record(use, input)

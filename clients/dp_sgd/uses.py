"""Uses of parameters in a forward pass, and the per-example gradients they give.

A use knows its input a and, after the backward pass, the gradient g with respect to its output.
Together they hold the gradient of every example: for a linear layer that of example i is g_i a_iᵀ.
A use gives the squared norms of these gradients, and their weighted sum, without ever holding
(examples x weights) for a linear layer on vectors.

Norms are never under-estimated. They are computed in float64; where terms may cancel (a linear layer
on sequences), the rounding error of the float32 sum that will be released is added, so that what is
released has a norm of at most the reported one (Higham 2002, section 3.1).

Source: book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at Small
Cost"; the product of norms is Goodfellow 2015, "Efficient Per-Example Gradient Computations".
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

_LONG, _PIECE = 2048, 64
_UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


class Use(ABC):
    """One use of parameters: `weight` and `bias` are parameter indices, None where absent.

    `input` is (n, ...), `output_gradient` likewise; both are set by the tape.
    """

    def __init__(self, weight: int | None, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.input: Tensor = torch.empty(0)
        self.output_gradient: Tensor = torch.empty(0)

    @property
    def parameters(self) -> list[int]:
        """Indices of the parameters that are trained through this use."""
        return [index for index in (self.weight, self.bias) if index is not None]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""

    @abstractmethod
    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""

    @abstractmethod
    def squared_norms(self) -> dict[int, Tensor]:
        """Return each parameter's squared per-example gradient norms, float64 (n,)."""

    @abstractmethod
    def add_weighted(self, factors: dict[int, Tensor], into: list[Tensor]) -> None:
        """Add Σ_i factor_i · gradient_i to `into[index]` for each parameter of this use."""

    @abstractmethod
    def per_example(self) -> dict[int, Tensor]:
        """Return each parameter's per-example gradients (n, *shape): for reused parameters."""

    def drop(self, dropped: Tensor) -> None:
        """Forget the examples marked in (n,): their values may be NaN, and 0 · NaN is NaN."""
        self.output_gradient = without(self.output_gradient, dropped)
        if self.input.is_floating_point():
            self.input = without(self.input, dropped)


class LinearUse(Use):
    """x Wᵀ + b on vectors (n, in) or sequences (n, ..., in)."""

    def __init__(
        self, weight: int | None, bias: int | None, w: Tensor, b: Tensor | None
    ) -> None:
        super().__init__(weight, bias)
        self._w, self._b = w, b

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return functional.linear(x, self._w, self._b)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return g @ self._w

    def squared_norms(self) -> dict[int, Tensor]:
        """Return each parameter's squared per-example gradient norms, float64 (n,)."""
        result = {}
        if self.input.ndim == 2:
            of_gradient = squares(self.output_gradient)
            if self.weight is not None:
                result[self.weight] = squares(self.input) * of_gradient
            if self.bias is not None:
                result[self.bias] = of_gradient
            return result
        a, g = self._sequences()
        if self.weight is not None:
            result[self.weight] = _sequence_squares(a, g)
        if self.bias is not None:
            result[self.bias] = _sum_squares(g)
        return result

    def add_weighted(self, factors: dict[int, Tensor], into: list[Tensor]) -> None:
        """Add Σ_i factor_i · gradient_i to `into[index]` for each parameter of this use."""
        a, g = self.input, self.output_gradient
        repeats = 1 if a.ndim == 2 else a.shape[1:-1].numel()
        a, g = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
        if self.weight is not None:
            scaled = g * _spread(factors[self.weight], repeats).unsqueeze(1)
            into[self.weight].addmm_(scaled.t(), a)
        if self.bias is not None:
            into[self.bias].addmv_(g.t(), _spread(factors[self.bias], repeats))

    def per_example(self) -> dict[int, Tensor]:
        """Return each parameter's per-example gradients (n, *shape): for reused parameters."""
        a, g = self._sequences()
        result = {}
        if self.weight is not None:
            result[self.weight] = g.transpose(1, 2) @ a
        if self.bias is not None:
            result[self.bias] = g.sum(1)
        return result

    def _sequences(self) -> tuple[Tensor, Tensor]:
        n = len(self.input)
        a, g = self.input, self.output_gradient
        return a.reshape(n, -1, a.shape[-1]), g.reshape(n, -1, g.shape[-1])


class ConvolutionUse(Use):
    """A convolution in 1, 2 or 3 dimensions with stride, padding, dilation and groups."""

    def __init__(
        self,
        weight: int | None,
        bias: int | None,
        w: Tensor,
        b: Tensor | None,
        *,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> None:
        super().__init__(weight, bias)
        self._w, self._b = w, b
        self._shape = (stride, padding, dilation, False, [0] * len(stride))
        self._groups = groups
        self._gradients: dict[int, Tensor] | None = None

    def drop(self, dropped: Tensor) -> None:
        """Forget the examples marked in (n,)."""
        gradients = self.per_example()
        self._gradients = {i: without(value, dropped) for i, value in gradients.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return torch.convolution(x, self._w, self._b, *self._shape, self._groups)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return _convolution_backward(g, x, self._w, self._shape, self._groups, want_input=True)

    def squared_norms(self) -> dict[int, Tensor]:
        """Return each parameter's squared per-example gradient norms, float64 (n,)."""
        return {index: squares(value) for index, value in self.per_example().items()}

    def add_weighted(self, factors: dict[int, Tensor], into: list[Tensor]) -> None:
        """Add Σ_i factor_i · gradient_i to `into[index]` for each parameter of this use."""
        for index, value in self.per_example().items():
            into[index].view(-1).addmv_(value.flatten(1).t(), factors[index])

    def per_example(self) -> dict[int, Tensor]:
        """Return each parameter's per-example gradients: one grouped convolution for all."""
        if self._gradients is None:
            a, g, n = self.input, self.output_gradient, len(self.input)
            self._gradients = {}
            if self.weight is not None:
                stacked = _convolution_backward(
                    g.reshape(1, -1, *g.shape[2:]),
                    a.reshape(1, -1, *a.shape[2:]),
                    # Only its shape is read: no gradient of the input is asked for.
                    self._w.new_empty(n * self._w.shape[0], *self._w.shape[1:]),
                    self._shape,
                    n * self._groups,
                    want_input=False,
                )
                self._gradients[self.weight] = stacked.view(n, *self._w.shape)
            if self.bias is not None:
                self._gradients[self.bias] = g.flatten(2).sum(2)
        return self._gradients


class EmbeddingUse(Use):
    """Rows of a table by index; row `padding_index` is never trained."""

    def __init__(self, weight: int, w: Tensor, padding_index: int | None) -> None:
        super().__init__(weight, None)
        self._index, self._w, self._padding = weight, w, padding_index

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return functional.embedding(x, self._w)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Indices have no gradient."""
        raise RuntimeError("an index has no gradient")

    def squared_norms(self) -> dict[int, Tensor]:
        """Return the squared per-example gradient norms: rows that repeat are added first."""
        n, rows, g = self._rows()
        owner = torch.arange(n, device=rows.device).repeat_interleave(rows.shape[1])
        keys, inverse = torch.unique(
            owner * len(self._w) + rows.flatten(), return_inverse=True
        )
        sums = g.new_zeros(len(keys), g.shape[-1], dtype=torch.float64)
        sums.index_add_(0, inverse, g.flatten(0, 1).double())
        norms = sums.new_zeros(n).index_add_(0, keys // len(self._w), sums.square().sum(1))
        return {self._index: norms}

    def add_weighted(self, factors: dict[int, Tensor], into: list[Tensor]) -> None:
        """Add Σ_i factor_i · gradient_i to `into[index]`."""
        _, rows, g = self._rows()
        scaled = g * factors[self._index][:, None, None]
        into[self._index].index_add_(0, rows.flatten(), scaled.flatten(0, 1))

    def per_example(self) -> dict[int, Tensor]:
        """Return the per-example gradients (n, rows, columns): for tied tables only."""
        n, rows, g = self._rows()
        result = g.new_zeros(n, *self._w.shape)
        result.scatter_add_(1, rows.unsqueeze(2).expand_as(g), g)
        return {self._index: result}

    def _rows(self) -> tuple[int, Tensor, Tensor]:
        n = len(self.input)
        rows = self.input.reshape(n, -1)
        g = self.output_gradient.reshape(n, rows.shape[1], -1)
        if self._padding is not None:
            g = torch.where((rows == self._padding).unsqueeze(2), torch.zeros_like(g), g)
        return n, rows, g


class AffineUse(Use):
    """x · w + b with w and b broadcast over x: the trained part of normalisation layers.

    Also a lone scale or a lone shift, such as a position embedding. `w` None is a scale of 1.
    """

    def __init__(
        self, weight: int | None, bias: int | None, w: Tensor | None, b: Tensor | None
    ) -> None:
        super().__init__(weight, bias)
        self._w, self._b = w, b

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self._w is None:
            return x if self._b is None else x + self._b
        return x * self._w if self._b is None else torch.addcmul(self._b, x, self._w)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return g if self._w is None else g * self._w

    def squared_norms(self) -> dict[int, Tensor]:
        """Return each parameter's squared per-example gradient norms, float64 (n,)."""
        return {index: squares(value) for index, value in self.per_example().items()}

    def add_weighted(self, factors: dict[int, Tensor], into: list[Tensor]) -> None:
        """Add Σ_i factor_i · gradient_i to `into[index]` for each parameter of this use."""
        for index, value in self.per_example().items():
            into[index].view(-1).addmv_(value.flatten(1).t(), factors[index])

    def per_example(self) -> dict[int, Tensor]:
        """Return each parameter's per-example gradients (n, *shape)."""
        g, result = self.output_gradient, {}
        if self.weight is not None and self._w is not None:
            result[self.weight] = _reduce(g * self.input, self._w)
        if self.bias is not None and self._b is not None:
            result[self.bias] = _reduce(g, self._b)
        return result


def without(values: Tensor, dropped: Tensor) -> Tensor:
    """Return values (n, ...) with the rows of dropped examples (n,) set to zero."""
    rows = dropped.view(-1, *[1] * (values.ndim - 1))
    return torch.where(rows, torch.zeros_like(values), values)


def _spread(factors: Tensor, repeats: int) -> Tensor:
    """Return each example's factor once for each of its rows."""
    return factors if repeats == 1 else factors.repeat_interleave(repeats)


def _reduce(values: Tensor, parameter: Tensor) -> Tensor:
    """Sum (n, ...) over the dimensions that a parameter was broadcast along, but not over n."""
    shape = (1,) * (values.ndim - parameter.ndim) + tuple(parameter.shape)
    summed = [d for d in range(1, values.ndim) if shape[d] == 1 and values.shape[d] != 1]
    reduced = values.sum(summed) if summed else values
    return reduced.reshape(len(values), *parameter.shape)


def squares(values: Tensor) -> Tensor:
    """Squared norm of each example's values (n, ...), float64, never too small.

    Long float32 rows are summed in short float32 pieces, which is twice as fast as converting them;
    rows whose squares may over- or underflow there are done again in float64.
    """
    rows = values.flatten(1)
    length = rows.shape[1]
    if values.dtype != torch.float32 or length < _LONG or length % _PIECE:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    pieces = torch.linalg.vector_norm(rows.view(len(rows), -1, _PIECE), dim=2)
    unsafe = ((pieces < 1e-15) & (pieces > 0) | (pieces > 1e15)).any(1)
    unsafe |= (pieces == 0).all(1)
    result = pieces.double().square_().sum(1).mul_(1.0 + _PIECE * 2.0**-23)
    if unsafe.any():
        wide = torch.linalg.vector_norm(rows[unsafe], dim=1, dtype=torch.float64)
        result[unsafe] = wide.square_()
    return result


def _sum_squares(g: Tensor) -> Tensor:
    """Squared norm of each example's sum over a sequence (n, t, d), float64, never too small."""
    norms = torch.linalg.vector_norm(g, dim=2, dtype=torch.float64).sum(1)
    return _with_rounding(g.double().sum(1).square().sum(1), norms, g)


def _sequence_squares(a: Tensor, g: Tensor) -> Tensor:
    """Squared norms of Σ_t g_t a_tᵀ for sequences a (n, t, d) and g (n, t, p), never too small."""
    length = a.shape[1]
    if 2 * length * length <= a.shape[2] * g.shape[2]:
        a64, g64 = a.double(), g.double()
        gram_a, gram_g = a64 @ a64.transpose(1, 2), g64 @ g64.transpose(1, 2)
        total = gram_a.mul_(gram_g).sum((1, 2)).clamp_(min=0)
    else:
        total = _blockwise_squares(a, g)
    products = torch.linalg.vector_norm(a, dim=2, dtype=torch.float64)
    products *= torch.linalg.vector_norm(g, dim=2, dtype=torch.float64)
    return _with_rounding(total, products.sum(1), a)


def _blockwise_squares(a: Tensor, g: Tensor, budget: int = 1 << 22) -> Tensor:
    """As `_sequence_squares` for long sequences: gradients made and dropped block by block."""
    n, _, d = a.shape
    block = max(1, budget // (n * d))
    total = a.new_zeros(n, dtype=torch.float64)
    for part in g.split(block, dim=2):
        total += squares(part.transpose(1, 2) @ a)
    return total


def _with_rounding(total: Tensor, absolute: Tensor, values: Tensor) -> Tensor:
    """Add to norms what rounding may add to the sums that are released.

    `absolute` bounds the sum of the norms of the terms: a sum of t terms computed with unit
    roundoff u differs from the exact one by at most about (t + 2) u of it.
    """
    slack = (values.shape[1] + 4) * _UNIT_ROUNDOFF.get(values.dtype, 2.0**-10)
    return (total.sqrt() + slack * absolute).square_()


def _convolution_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    shape: tuple[list[int], list[int], list[int], bool, list[int]],
    groups: int,
    *,
    want_input: bool,
) -> Tensor:
    mask = [want_input, not want_input, False]
    gradients = torch.ops.aten.convolution_backward(g, x, w, None, *shape, groups, mask)
    return gradients[0] if want_input else gradients[1]

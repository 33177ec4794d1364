"""Uses of stacked parameters: the counterparts of `uses` for a cohort of clients.

Inputs are (rows, ...) in a `Ragged` layout; parameters are (clients, *shape). Linear layers on
vectors run over many clients at once; everything else goes client by client, through the very code
that runs when the client trains alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.cohort.ragged import Ragged, Together
from fedsim.clients.dp_sgd.per_example.interface import UncoveredParameterError
from fedsim.clients.dp_sgd.per_example.layers import (
    AffineUse,
    ConvolutionUse,
    EmbeddingUse,
    LinearUse,
)
from fedsim.clients.dp_sgd.per_example.layers.base import Use
from fedsim.clients.dp_sgd.per_example.layers.convolving import convolve, input_gradient
from fedsim.clients.dp_sgd.per_example.products import add_product, product

Addition = Callable[[Tensor], object]
"""Adds one client's part of a gradient to a tensor of the parameter's shape, or writes it."""


class CohortUse(ABC):
    """One use of stacked parameters.

    Args:
        single: the same use, with the values of one client.
        w: stacked weights (clients, ...), or None.
        b: stacked biases (clients, ...), or None.
        layout: whose rows are where.
    """

    def __init__(self, single: Use, w: Tensor | None, b: Tensor | None, layout: Ragged) -> None:
        self.single = single
        self._w, self._b, self._layout = w, b, layout
        self._parts: list[tuple[int, slice, Use]] = []
        self.input: Tensor = single.input
        self.output_gradient: Tensor = single.output_gradient

    @property
    def needs_input(self) -> bool:
        """Whether the input is read after the backward pass."""
        return self.single.needs_input

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""

    @abstractmethod
    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms of all rows, float64 (rows,)."""
        result = torch.zeros(
            self._layout.rows, dtype=torch.float64, device=self.output_gradient.device
        )
        for _, rows, part in self._by_client():
            result[rows] = part.squared_norms_of(index)
        return result

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add each client's Σ_i factor_i · gradient_i to its part of `into` (clients, *shape)."""
        additions = self.weighted(index, factors)
        for client, add in zip(self._layout.clients, additions, strict=True):
            add(into[client])

    def weighted(self, index: int, factors: Tensor) -> list[Addition]:
        """Return what adds Σ_i factor_i · gradient_i of each client that has rows."""
        return [
            partial(part.add_weighted, index, factors[rows]) for _, rows, part in self._by_client()
        ]

    def write_gradient(self, index: int, into: Tensor) -> None:
        """Write each client's Σ_i gradient_i to its part of `into` (clients, *shape).

        Raises:
            UncoveredParameterError: only linear layers on vectors have a rule for this.
        """
        additions = self.written(index)
        for client, write in zip(self._layout.clients, additions, strict=True):
            write(into[client])

    def written(self, index: int) -> list[Addition]:
        """Return what writes Σ_i gradient_i of each client that has rows.

        Raises:
            UncoveredParameterError: only linear layers on vectors have a rule for this.
        """
        raise UncoveredParameterError("a cohort without privacy trains linear layers only")

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (rows,) zero; called after the norms."""
        for _, rows, part in self._by_client():
            part.drop(dropped[rows])

    def _by_client(self) -> list[tuple[int, slice, Use]]:
        """Return each client's use of its own rows."""
        if not self._parts:
            self.single.input, self.single.output_gradient = self.input, self.output_gradient
            self._parts = [(k, r, self._part(k, r)) for k, r in self._layout.each()]
        return self._parts

    def _part(self, client: int, rows: slice) -> Use:
        """Return the use of a client's own rows."""
        return self.single.of_rows(rows)

    def _for_each(self, of: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return `of(client, *its rows)` of all clients, each in its rows."""
        result: Tensor | None = None
        for client, at in self._layout.each():
            own = of(client, *(part[at] for part in rows))
            if result is None:
                result = _rows_like(own, self._layout.rows)
            result[at] = own
        if result is None:
            raise ValueError("no client has any rows")
        return result


class CohortLinear(CohortUse):
    """x_k W_kᵀ + b_k; on vectors, all of it over runs of clients at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w = _given(self._w)
        # Written into place: an output that is a view could not be changed in place (ReLU).
        output = x.new_zeros(*x.shape[:-1], w.shape[1])
        flat = output.view(-1, w.shape[1])
        self._layout.affine(x.reshape(-1, x.shape[-1]), w, self._b, flat)
        return output

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        result = g.new_zeros(x.shape)
        rows = g.reshape(-1, g.shape[-1])
        self._layout.products(rows, _given(self._w), result.view(-1, x.shape[-1]))
        return result

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms of all rows, float64 (rows,)."""
        single = self._whole()
        return super().squared_norms_of(index) if single is None else single.squared_norms_of(index)

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add each client's Σ_i factor_i · gradient_i to its part of `into` (clients, *shape)."""
        single, layout = self._whole(), self._layout
        if single is None or not isinstance(layout, Together):
            super().add_weighted(index, factors, into)
        elif index == single.bias:
            layout.add_sums(single.scaled_by(factors), into)
        else:
            layout.add_outer(single.scaled_by(factors), self.input.flatten(1), into)

    def weighted(self, index: int, factors: Tensor) -> list[Addition]:
        """Return what adds Σ_i factor_i · gradient_i of each client that has rows."""
        single = self._whole()
        if single is None:
            return super().weighted(index, factors)
        scaled = self._layout.own_rows(single.scaled_by(factors))
        if index == single.bias:
            return [partial(_add_sum, g) for g in scaled]
        inputs = self._layout.own_rows(self.input.flatten(1))
        return [partial(_add_outer, g, x) for g, x in zip(scaled, inputs, strict=True)]

    def write_gradient(self, index: int, into: Tensor) -> None:
        """Write each client's Σ_i gradient_i to its part of `into` (clients, *shape)."""
        single, layout = self._whole(), self._layout
        if single is None or not isinstance(layout, Together):
            super().write_gradient(index, into)
        elif index == single.bias:
            layout.add_sums(self.output_gradient.flatten(1), into.zero_())
        else:
            layout.outer(self.output_gradient.flatten(1), self.input.flatten(1), into)

    def written(self, index: int) -> list[Addition]:
        """Return what writes Σ_i gradient_i of each client that has rows."""
        single = self._whole()
        if single is None:
            return super().written(index)
        gradients = self._layout.own_rows(self.output_gradient.flatten(1))
        if index == single.bias:
            return [partial(_write_sum, g) for g in gradients]
        inputs = self._layout.own_rows(self.input.flatten(1))
        return [partial(_write_outer, g, x) for g, x in zip(gradients, inputs, strict=True)]

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the rows marked in (rows,) zero; called after the norms."""
        single = self._whole()
        if single is None:
            super().drop(dropped)
        else:
            single.drop(dropped)
            self.input, self.output_gradient = single.input, single.output_gradient

    def _whole(self) -> LinearUse | None:
        """Return the use of all rows where examples are vectors: whose they are plays no part."""
        single = self.single
        if not isinstance(single, LinearUse):
            raise TypeError(f"a linear layer's use expected, got {type(single).__name__}")
        single.input, single.output_gradient = self.input, self.output_gradient
        return single if single.on_vectors else None


class CohortConvolution(CohortUse):
    """One convolution for each client."""

    def __init__(self, single: Use, w: Tensor | None, b: Tensor | None, layout: Ragged) -> None:
        super().__init__(single, w, b, layout)
        self._patches: dict[int, Tensor | None] = {}  # by client, where the forward copied them out

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w, single = _given(self._w), self._single
        biases = [None] * len(w) if self._b is None else list(self._b)

        def of(k: int, own: Tensor) -> Tensor:
            y, patches = convolve(own, w[k], biases[k], single.geometry, last=single.channels_last)
            self._patches[k] = patches if self.needs_input else None
            return y

        return self._for_each(of, x)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        w, single = _given(self._w), self._single

        def of(k: int, g: Tensor, x: Tensor) -> Tensor:
            return input_gradient(x, g, w[k], single.geometry, last=single.channels_last)

        return self._for_each(of, g, x)

    def _part(self, client: int, rows: slice) -> Use:
        part = self._single.of_rows(rows)
        part.patches = self._patches[client]
        return part

    @property
    def _single(self) -> ConvolutionUse:
        if not isinstance(self.single, ConvolutionUse):
            raise TypeError(f"a convolution's use expected, got {type(self.single).__name__}")
        return self.single


class CohortEmbedding(CohortUse):
    """Rows of each client's own table."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w = _given(self._w)
        return self._for_each(lambda k, own: functional.embedding(own, w[k]), x)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Indices have no gradient."""
        raise RuntimeError("an index has no gradient")


class CohortAffine(CohortUse):
    """x · w_k + b_k with each client's w and b broadcast over its examples."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w, b = self._w, self._b

        def of(k: int, own: Tensor) -> Tensor:
            if w is None:
                return own.clone() if b is None else own + b[k]
            return own * w[k] if b is None else torch.addcmul(b[k], own, w[k])

        return self._for_each(of, x)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        w = self._w
        return g if w is None else self._for_each(lambda k, own: own * w[k], g)


def _rows_like(values: Tensor, rows: int) -> Tensor:
    """Return zeros (rows, ...) in the order in memory of values (n, ...)."""
    strides, each = torch.empty_like(values).stride(), values.shape[1:].numel()
    zeros = values.new_zeros(rows, *values.shape[1:])
    return zeros if strides[0] != each else zeros.as_strided(zeros.shape, (each, *strides[1:]))


def _add_sum(g: Tensor, into: Tensor) -> None:
    into.add_(g.sum(0))


def _add_outer(g: Tensor, x: Tensor, into: Tensor) -> None:
    add_product(into, g.t(), x)


def _write_sum(g: Tensor, into: Tensor) -> None:
    into.copy_(g.sum(0))


def _write_outer(g: Tensor, x: Tensor, into: Tensor) -> None:
    # Alone, such a product goes to freshly allocated memory: see `Together.outer`.
    into.copy_(product(g.t(), x))


def _given(stacked: Tensor | None) -> Tensor:
    if stacked is None:
        raise ValueError("this layer needs weights")
    return stacked


def cohort_use(single: Use, values: Sequence[Tensor], layout: Ragged) -> CohortUse | None:
    """Return the counterpart of a use for a cohort, None where there is none.

    Args:
        single: a use made for one client.
        values: for each parameter (clients, *shape).
        layout: whose rows are where.
    """
    kinds: dict[type[Use], type[CohortUse]] = {
        LinearUse: CohortLinear,
        ConvolutionUse: CohortConvolution,
        EmbeddingUse: CohortEmbedding,
        AffineUse: CohortAffine,
    }
    kind = kinds.get(type(single))
    if kind is None:
        return None
    clients = len(values[0])
    w, b = (
        _stacked(own, index, values, clients)
        for own, index in ((single.w, single.weight), (single.b, single.bias))
    )
    return kind(single, w, b, layout)


def _stacked(
    own: Tensor | None, index: int | None, values: Sequence[Tensor], clients: int
) -> Tensor | None:
    """Return a parameter for all clients, in the shape that the use gives it."""
    if own is None:
        return None
    if index is None:  # frozen: the same for everybody
        return own.expand(clients, *own.shape)
    return values[index].reshape(clients, *own.shape)

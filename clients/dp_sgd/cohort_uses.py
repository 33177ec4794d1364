"""Uses of stacked parameters: the batched counterparts of `uses` for a cohort of clients.

Inputs are (clients · lot, ...), client after client; parameters are (clients, *shape). The norms
and gradients of examples do not depend on whose they are: they come from the use of one client.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.uses import AffineUse, ConvolutionUse, EmbeddingUse, LinearUse
from fedsim.clients.dp_sgd.uses.base import Use


class CohortUse(ABC):
    """One use of stacked parameters.

    Args:
        single: the same use for one client.
        w: stacked weights (clients, ...), or None.
        b: stacked biases (clients, ...), or None.
    """

    def __init__(self, single: Use, w: Tensor | None, b: Tensor | None) -> None:
        self.single = single
        self._w, self._b = w, b
        self.input: Tensor = torch.empty(0)
        self.output_gradient: Tensor = torch.empty(0)

    def hand_over(self) -> None:
        """Give what the tape has filled in to the use of one client, which knows the norms."""
        self.single.input, self.single.output_gradient = self.input, self.output_gradient

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

    def add_weighted(self, factors: Tensor, into: Sequence[Tensor]) -> None:
        """Add each client's Σ_i factor_i · gradient_i to its part of `into[index]`.

        Args:
            factors: (clients, lot).
            into: for each parameter (clients, *shape).
        """
        for index in self.single.parameters:
            rows = self.single.gradients_of(index).reshape(*factors.shape, -1)
            added = torch.bmm(factors.unsqueeze(1), rows).squeeze(1)
            into[index].add_(added.view(into[index].shape))


class CohortLinear(CohortUse):
    """x_k W_kᵀ + b_k; gradients of single examples are never held."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w = _given(self._w)
        rows = x.reshape(len(w), -1, x.shape[-1])
        # Written into place: an output that is a view could not be changed in place (ReLU).
        output = x.new_empty(*x.shape[:-1], w.shape[1])
        into = output.view(len(w), -1, w.shape[1])
        if self._b is None:
            torch.bmm(rows, w.transpose(1, 2), out=into)
        else:
            torch.baddbmm(self._b.unsqueeze(1), rows, w.transpose(1, 2), out=into)
        return output

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        w = _given(self._w)
        return torch.bmm(g.reshape(len(w), -1, g.shape[-1]), w).view(x.shape)

    def add_weighted(self, factors: Tensor, into: Sequence[Tensor]) -> None:
        """Add each client's Σ_i factor_i · gradient_i to its part of `into[index]`."""
        g = self.single.output_gradient
        g = g.reshape(len(factors), -1, g.shape[-1])
        repeats = g.shape[1] // factors.shape[1]
        spread = factors.repeat_interleave(repeats, dim=1) if repeats > 1 else factors
        scaled = g * spread.unsqueeze(2)
        if self.single.weight is not None:
            rows = self.single.input.reshape(*spread.shape, -1)
            into[self.single.weight].baddbmm_(scaled.transpose(1, 2), rows)
        if self.single.bias is not None:
            into[self.single.bias].add_(scaled.sum(1))


class CohortConvolution(CohortUse):
    """One convolution for each client: grouped ones are slower than one after the other."""

    def __init__(self, single: ConvolutionUse, w: Tensor | None, b: Tensor | None) -> None:
        super().__init__(single, w, b)
        self._geometry = single.geometry

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w = _given(self._w)
        biases = [None] * len(w) if self._b is None else list(self._b)
        parts = zip(x.chunk(len(w)), w, biases, strict=True)
        return torch.cat([torch.convolution(*part, *self._geometry) for part in parts])

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        w = _given(self._w)
        parts = zip(g.chunk(len(w)), x.chunk(len(w)), w, strict=True)
        backward = torch.ops.aten.convolution_backward
        return torch.cat(
            [backward(*part, None, *self._geometry, [True, False, False])[0] for part in parts]
        )


class CohortEmbedding(CohortUse):
    """Rows of each client's own table."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        w = _given(self._w)
        offsets = torch.arange(len(w), device=x.device) * w.shape[1]
        rows = x.reshape(len(w), -1) + offsets.unsqueeze(1)
        return functional.embedding(rows.view(x.shape), w.reshape(-1, w.shape[-1]))

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Indices have no gradient."""
        raise RuntimeError("an index has no gradient")


class CohortAffine(CohortUse):
    """x · w_k + b_k with each client's w and b broadcast over its examples."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        output = x if self._w is None else x * _per_example(self._w, x)
        if self._b is not None:
            return output + _per_example(self._b, x)
        return output.clone() if output is x else output

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape is read."""
        return g if self._w is None else g * _per_example(self._w, x)


def _given(stacked: Tensor | None) -> Tensor:
    if stacked is None:
        raise ValueError("this layer needs weights")
    return stacked


def _per_example(stacked: Tensor, x: Tensor) -> Tensor:
    """Return (clients, ...) as (clients · lot, ...), ready to broadcast with x."""
    own = stacked.shape[1:]
    if len(own) == x.ndim:  # its leading 1 stands for the examples
        own = own[1:]
    ones = (1,) * (x.ndim - 1 - len(own))
    shaped = stacked.reshape(len(stacked), *ones, *own)
    return shaped.repeat_interleave(len(x) // len(stacked), dim=0)


def cohort_use(single: Use, values: Sequence[Tensor]) -> CohortUse | None:
    """Return the batched counterpart of a use, None where there is none.

    Args:
        single: a use made for one client.
        values: for each parameter (clients, *shape).
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
    return kind(single, w, b)


def _stacked(
    own: Tensor | None, index: int | None, values: Sequence[Tensor], clients: int
) -> Tensor | None:
    """Return a parameter for all clients, in the shape that the use gives it."""
    if own is None:
        return None
    if index is None:  # frozen: the same for everybody
        return own.expand(clients, *own.shape)
    return values[index].reshape(clients, *own.shape)

"""What a use of parameters must know: its forward, its input gradient, its example gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.layers.norms import (
    row_norms,
    squares,
    unit_roundoff,
    without,
)

ALL = slice(None)
_NOTHING = torch.empty(0)  # before the tape fills a use in


class ExampleGradients(Protocol):
    """The gradients of all examples with respect to some parameters, by parameter index."""

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        ...

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""
        ...

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        ...


class Workspace:
    """Memory for the per-example gradients of parameters, used again for each lot.

    Args:
        parameters: by index.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held: dict[int, Tensor] = {}

    def __call__(self, index: int, examples: int, like: Tensor) -> Tensor:
        """Return (examples, *shape) of a parameter, with any values; earlier ones are lost."""
        held = self._held.get(index)
        if held is None or held.shape[0] < examples or held.dtype != like.dtype:
            held = like.new_empty(examples, *self._parameters[index].shape)
            self._held[index] = held
        return held[:examples]


class ExampleUse(ABC):
    """Gradients of all examples with respect to the parameters that one operation used.

    Args:
        parameters: their indices.
    """

    def __init__(self, parameters: list[int]) -> None:
        self.parameters = parameters

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of examples n."""

    @abstractmethod
    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""

    @abstractmethod
    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""

    @abstractmethod
    def gradients_of(self, index: int, rows: slice = ALL) -> Tensor:
        """Return the gradients (n, *shape), or some rows of each: (n, rows, *shape[1:])."""

    @abstractmethod
    def rounding_of(self, index: int) -> Tensor:
        """Return (n,), float64: at most so much may rounding add to what is added."""

    @abstractmethod
    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""

    def squared_norms(self) -> dict[int, Tensor]:
        """Return the squared gradient norms of each parameter of this use, float64 (n,)."""
        return {index: self.squared_norms_of(index) for index in self.parameters}

    def per_example(self) -> dict[int, Tensor]:
        """Return the gradients (n, *shape) of each parameter of this use."""
        return {index: self.gradients_of(index) for index in self.parameters}


class Use(ExampleUse):
    """One use of a layer: its output from an input, and what is needed for its gradients.

    Attributes:
        weight: index of the weight, None where it is not trained.
        bias: index of the bias, None where it is not trained.
        w: the weight's values, None where the layer has none.
        b: the bias' values, None where the layer has none.
        input: (n, ...), set by the tape in the backward pass.
        output_gradient: (n, ...), likewise.
    """

    def __init__(
        self, weight: int | None, bias: int | None, w: Tensor | None, b: Tensor | None
    ) -> None:
        super().__init__([index for index in (weight, bias) if index is not None])
        self.weight, self.bias, self.w, self.b = weight, bias, w, b
        self.input: Tensor = _NOTHING
        self.output_gradient: Tensor = _NOTHING
        self._held: dict[int, Tensor] = {}

    def of_rows(self, rows: slice) -> Self:
        """Return the same use of some of the examples only; to be asked before anything else."""
        part = copy(self)
        part._held = {}
        part.output_gradient = self.output_gradient[rows]
        if self.needs_input:
            part.input = self.input[rows]
        return part

    @property
    def examples(self) -> int:
        """Number of examples n."""
        return self.output_gradient.shape[0]

    @property
    def needs_input(self) -> bool:
        """Whether the gradients need the input: where only a bias is trained, nothing is kept."""
        return self.weight is not None

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""

    @abstractmethod
    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape may be read."""

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        self.output_gradient = without(self.output_gradient, dropped)
        if self.needs_input and self.input.is_floating_point():
            self.input = without(self.input, dropped)


class HeldUse(ExampleUse):
    """A use whose gradients are held for all examples, and measured as they are."""

    def __init__(self, parameters: list[int]) -> None:
        super().__init__(parameters)
        self._held: dict[int, Tensor] = {}

    @abstractmethod
    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of one parameter; one follows another in memory."""

    def squared_norms_of(self, index: int) -> Tensor:
        """Return the squared gradient norms, float64 (n,): never below those of what is added."""
        return squares(as_they_lie(self.gradients_of(index)))

    def add_weighted(self, index: int, factors: Tensor, into: Tensor) -> None:
        """Add Σ_i factor_i · gradient_i to `into`, which has the parameter's shape."""
        add_rows(self.gradients_of(index), factors, into)

    def gradients_of(self, index: int, rows: slice = ALL) -> Tensor:
        """Return the gradients (n, *shape), or some rows of each: (n, rows, *shape[1:])."""
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = self.compute(index)
        return held if rows == ALL else held[:, rows]

    def rounding_of(self, index: int) -> Tensor:
        """Return (n,), float64: at most so much may rounding add to what is added."""
        held = as_they_lie(self.gradients_of(index)).flatten(1)
        return row_norms(held) * (4 * unit_roundoff(held))

    def drop(self, dropped: Tensor) -> None:
        """Make the gradients of the examples marked in (n,) zero; called after the norms."""
        self._held = {i: without(self.gradients_of(i), dropped) for i in self.parameters}


class MaterialisedUse(HeldUse, Use):
    """A use of a layer with small parameters: each example's gradient is held."""

    def __init__(
        self, weight: int | None, bias: int | None, w: Tensor | None, b: Tensor | None
    ) -> None:
        Use.__init__(self, weight, bias, w, b)
        self.workspace: Workspace | None = None


def add_rows(gradients: Tensor, factors: Tensor, into: Tensor) -> None:
    """Add Σ_i factor_i · gradients_i to `into`, which has the shape of one of them."""
    lying = as_they_lie(gradients)
    if lying is gradients:
        into.view(-1).addmv_(gradients.flatten(1).t(), factors)
        return
    total = torch.mv(lying.flatten(1).t(), factors).view(lying.shape[1:])
    as_they_lie(into.unsqueeze(0), like=gradients)[0].add_(total)


def as_they_lie(values: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Return values (n, ...) with the dimensions after the first in their order in memory.

    Some gradients are made in another order than the parameter's; norms and sums need no copy.

    Args:
        values: the values.
        like: whose order in memory is meant, if not that of `values`.
    """
    known = values if like is None else like
    if known.is_contiguous():
        return values
    strides = known.stride()
    return values.permute(0, *sorted(range(1, known.ndim), key=lambda d: -strides[d]))


def reduced(values: Tensor, shape: torch.Size) -> Tensor:
    """Sum (n, ...) over the dimensions that a shape was broadcast along, but not over n."""
    full = (1,) * (values.ndim - len(shape)) + tuple(shape)
    summed = [d for d in range(1, values.ndim) if full[d] == 1 and values.shape[d] != 1]
    result = values.sum(summed) if summed else values
    return result.reshape(len(values), *shape)

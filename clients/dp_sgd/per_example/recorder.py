"""The interface between a tape and its routes."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Recordable(Protocol):
    """What a tape can note: a use, or the like of one."""

    input: Tensor
    output_gradient: Tensor

    @property
    def needs_input(self) -> bool:
        """Whether the input is read after the backward pass."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        ...

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape may be read."""
        ...


class Recorder(Protocol):
    """The part of a `Tape` that routes use; see there."""

    examples: int
    stacked: Mapping[int, Tensor]

    def tracked(self, parameter: Any) -> int | None:
        """Return the index of a tracked parameter, else None."""
        ...

    def record(self, use: Recordable, x: Tensor) -> Tensor | None:
        """Run a use on its input and note it; None where the input is not one row per example."""
        ...

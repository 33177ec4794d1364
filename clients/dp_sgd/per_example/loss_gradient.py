"""Losses that know their gradient at the outputs, which saves a backward pass of torch."""

from typing import Any, Protocol

from torch import Tensor


class KnownGradient(Protocol):
    """A loss that knows its gradient without a backward pass of torch."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient at the outputs (n, ...) of the sum of weighted losses."""
        ...


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return the loss if it knows its gradient."""
    # To ask for an instance of a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None

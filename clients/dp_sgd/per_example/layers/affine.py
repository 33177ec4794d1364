"""Scales and shifts: the trained part of normalisation layers, position embeddings, LayerScale."""

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.layers.base import MaterialisedUse, reduced


class AffineUse(MaterialisedUse):
    """x · w + b with w and b broadcast over x (n, ...).

    Args:
        weight: index of w's parameter, None where it is not trained.
        bias: index of b's parameter, None where it is not trained.
        w: the scale, None for 1; it may be a reshaped view of the parameter.
        b: the shift, None for 0; likewise.
        shape: of the parameters, None where w and b have it.
    """

    def __init__(
        self,
        weight: int | None,
        bias: int | None,
        w: Tensor | None,
        b: Tensor | None,
        shape: torch.Size | None = None,
    ) -> None:
        super().__init__(weight, bias, w, b)
        self._shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.w is None:
            return x.clone() if self.b is None else x + self.b
        return x * self.w if self.b is None else torch.addcmul(self.b, x, self.w)

    def input_gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with respect to the input; of x only the shape may be read."""
        return g if self.w is None else g * self.w

    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of one parameter."""
        like = self.w if index == self.weight else self.b
        if like is None:
            raise RuntimeError("a trained scale or shift must be given")
        g = self.output_gradient
        values = g * self.input if index == self.weight else g
        result = reduced(values, like.shape)
        return result if self._shape is None else result.reshape(len(values), *self._shape)

"""Uses of parameters in a forward pass, and the per-example gradients they give.

A use knows its input a and, after the backward pass, the gradient g with respect to its output.
Together they hold the gradient of every example: for a linear layer that of example i is g_i a_iᵀ.
A use gives the squared norms of these gradients, and their weighted sum, without ever holding
(examples x weights) for a large linear layer.

Norms are never under-estimated. What is materialised is measured in float64 as it will be released.
What is not (a large linear layer on sequences) is measured in float64, and a bound on the rounding
of the float32 sum that will be released is added (Higham 2002, section 3.1).

Source: book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at Small
Cost"; the product of norms is Goodfellow 2015, "Efficient Per-Example Gradient Computations".
"""

from fedsim.clients.dp_sgd.per_example.layers.affine import AffineUse
from fedsim.clients.dp_sgd.per_example.layers.base import (
    ExampleGradients,
    ExampleUse,
    HeldUse,
    MaterialisedUse,
    Use,
)
from fedsim.clients.dp_sgd.per_example.layers.convolution import ConvolutionUse
from fedsim.clients.dp_sgd.per_example.layers.embedding import EmbeddingUse
from fedsim.clients.dp_sgd.per_example.layers.linear import LinearUse
from fedsim.clients.dp_sgd.per_example.layers.norms import squares, without
from fedsim.clients.dp_sgd.per_example.layers.reused import by_parameter

__all__ = [
    "AffineUse",
    "ConvolutionUse",
    "EmbeddingUse",
    "ExampleGradients",
    "ExampleUse",
    "HeldUse",
    "LinearUse",
    "MaterialisedUse",
    "Use",
    "by_parameter",
    "squares",
    "without",
]

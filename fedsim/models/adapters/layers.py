"""Layers with a low-rank adapter: W x + scale · B A x with W frozen.

A and B are plain layers without bias, so their per-example gradients are those of the layer rules.
A starts from random values and B from 0, so the initial model is the backbone.

Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685);
with privacy, Yu et al. 2022, "Differentially Private Fine-tuning of Language Models"
(arXiv:2110.06500).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AdaptedLayer(nn.Module):
    """A frozen layer with a low-rank adapter.

    Code that reads `weight` or `bias` of the layer gets the values of the merged layer.

    Args:
        base: the frozen layer.
        down: A, from the layer's input to `rank` values.
        up: B, from there to the layer's output; its weight is set to 0.
        scale: of the adapter's output.
    """

    def __init__(self, base: nn.Module, down: nn.Module, up: nn.Module, scale: float) -> None:
        super().__init__()
        self.base, self.down, self.up, self.scale = base, down, up, scale
        nn.init.zeros_(_weight(up))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's."""
        return self.base(x) + self.scale * self.up(self.down(x))

    @property
    def weight(self) -> Tensor:
        """Weight of the merged layer."""
        return _weight(self.base) + self.scale * self.product()

    @property
    def bias(self) -> Tensor | None:
        """Bias of the layer."""
        bias: Any = getattr(self.base, "bias", None)
        return bias

    def product(self) -> Tensor:
        """Return B A in the shape of the layer's weight."""
        down, up = _weight(self.down), _weight(self.up)
        if isinstance(self.base, nn.Embedding):  # a table has its rows as inputs
            return down @ up.T
        return (up.flatten(1) @ down.flatten(1)).view(up.shape[0], *down.shape[1:])

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Return the plain layer with the adapter added to its weight, in place."""
        _weight(self.base).copy_(self.weight)
        return self.base


def _weight(layer: nn.Module) -> Tensor:
    weight: Any = layer.weight
    return weight


def takes_adapter(layer: nn.Module) -> bool:
    """Whether the weight of a layer is frozen, and the layer of a kind that can get an adapter.

    Grouped convolutions, padding by other values than zeros, and tables whose lookups change them
    take none: their gradients have no rule.
    """
    if type(layer) not in _FACTORS or _weight(layer).requires_grad:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return True


def adapted(layer: nn.Module, rank: int, scale: float) -> AdaptedLayer:
    """Return a layer with an adapter.

    Args:
        layer: the layer, which the result keeps (`takes_adapter`).
        rank: r ≥ 1.
        scale: of the adapter's output.
    """
    return AdaptedLayer(layer, *_FACTORS[type(layer)](layer, rank), scale)


def _linear_factors(layer: nn.Linear, rank: int) -> tuple[nn.Module, nn.Module]:
    down = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
    return down, nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)


def _embedding_factors(layer: nn.Embedding, rank: int) -> tuple[nn.Module, nn.Module]:
    kind, padding = layer.weight.dtype, layer.padding_idx
    down = nn.Embedding(layer.num_embeddings, rank, padding_idx=padding, dtype=kind)
    with torch.no_grad():
        down.weight.mul_(rank**-0.5)
    return down, nn.Linear(rank, layer.embedding_dim, bias=False, dtype=kind)


def _convolution_factors(layer: Any, rank: int) -> tuple[nn.Module, nn.Module]:
    kind, dtype = type(layer), layer.weight.dtype
    names = ("kernel_size", "stride", "padding", "dilation")
    geometry = {name: getattr(layer, name) for name in names}
    down = kind(layer.in_channels, rank, bias=False, dtype=dtype, **geometry)
    return down, kind(rank, layer.out_channels, kernel_size=1, bias=False, dtype=dtype)


# Exactly these types: a subclass may do anything with its weight.
_FACTORS: Mapping[type[nn.Module], Callable[[Any, int], tuple[nn.Module, nn.Module]]] = {
    nn.Linear: _linear_factors,
    nn.Embedding: _embedding_factors,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution_factors),
}

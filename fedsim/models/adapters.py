"""Low-rank adapters (LoRA) on frozen layers: W x becomes W x + scale · B A x.

W is the weight of a frozen layer and x the layer's input. A and B are plain layers without bias, so
the usual rules for per-example gradients apply to them. A starts from random values and B from 0.
So the initial model equals the model without adapters. After training, the product scale · B A can
be added to W.

Sources: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
With privacy: Yu et al. 2022, "Differentially Private Fine-tuning of Language Models"
(arXiv:2110.06500).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedsim.core.formatting import some_of
from fedsim.core.names import closest_hint
from fedsim.models.catalog import ModelError
from fedsim.models.settings import LoraSettings


class AdaptedLayer(nn.Module):
    """A frozen layer with a low-rank adapter.

    Code that reads `weight` or `bias` of the layer gets the values of the merged layer.

    Args:
        base: the frozen layer.
        down: the layer A, which maps the frozen layer's input to `rank` values.
        up: the layer B, which maps those values to the frozen layer's output; its weight is set to
            0.
        scale: factor by which the adapter's output is multiplied.
    """

    def __init__(self, base: nn.Module, down: nn.Module, up: nn.Module, scale: float) -> None:
        super().__init__()
        self.base, self.down, self.up, self.scale = base, down, up, scale
        nn.init.zeros_(_weight(up))

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output plus the scaled output of the adapter."""
        return self.base(x) + self.scale * self.up(self.down(x))

    @property
    def weight(self) -> Tensor:
        """Weight of the merged layer, in the shape of the frozen layer's weight."""
        return _weight(self.base) + self.scale * self.product()

    @property
    def bias(self) -> Tensor | None:
        """Bias of the frozen layer; None if it has none."""
        bias: Any = getattr(self.base, "bias", None)
        return bias

    def product(self) -> Tensor:
        """Return the adapter's product B A (`up` times `down`), shaped like the frozen weight."""
        down, up = _weight(self.down), _weight(self.up)
        if isinstance(self.base, nn.Embedding):  # the rows of an embedding's table are its inputs
            return down @ up.T
        return (up.flatten(1) @ down.flatten(1)).view(up.shape[0], *down.shape[1:])

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Add the adapter to the frozen layer's weight in place, and return the frozen layer."""
        _weight(self.base).copy_(self.weight)
        return self.base


def _weight(layer: nn.Module) -> Tensor:
    weight: Any = layer.weight
    return weight


def takes_adapter(layer: nn.Module) -> bool:
    """Whether a layer can get an adapter: its weight is frozen and its type is supported.

    Some layers are not supported because there is no rule for their per-example gradients. These
    are grouped convolutions, padding with other values than zeros, and embeddings with `max_norm`,
    `scale_grad_by_freq` or `sparse`.
    """
    if type(layer) not in _FACTORS or _weight(layer).requires_grad:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return True


def adapted(layer: nn.Module, rank: int, scale: float) -> AdaptedLayer:
    """Return an `AdaptedLayer`, which adds a new adapter to a frozen layer.

    Args:
        layer: the frozen layer, for which `takes_adapter` is true; it is not copied.
        rank: rank of the adapter, ≥ 1.
        scale: factor by which the adapter's output is multiplied.
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


_MAX_NAMES = 8


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters of a model except those that match a pattern.

    Args:
        model: the model.
        patterns: shell patterns of parameter names, such as `head.*`.

    Raises:
        ModelError: a pattern matches no parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(named[name]) for name in matching(patterns, named, "model.train", "parameter")}
    for parameter in named.values():
        parameter.requires_grad_(id(parameter) in chosen)


def add_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """Return a model with a new adapter on each frozen layer that the settings target.

    The initial weights of each adapter's first layer are drawn from torch's global generator, in
    the order of the model's layers.

    Args:
        model: the model, changed in place. Freeze its layers first: a layer whose weight is not
            frozen gets no adapter.
        settings: the setting `model.lora`: rank, scale and targets.

    Raises:
        ModelError: a target matches no layer that can get an adapter.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    layers = {name: layer for name, layer in named.items() if takes_adapter(layer)}
    kind = "frozen linear, embedding or convolution layer"
    made: dict[int, AdaptedLayer] = {}  # a layer with two names has one adapter
    for name in matching(settings.targets, layers, "model.lora.targets", kind):
        layer = layers[name]
        if id(layer) not in made:
            made[id(layer)] = adapted(layer, settings.rank, settings.scale)
        model = _replaced(model, name, made[id(layer)])
    return model


def merge_adapters(model: nn.Module) -> nn.Module:
    """Replace each layer with an adapter by one plain merged layer; return the changed model."""
    merged: dict[int, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, AdaptedLayer):
            if id(layer) not in merged:
                merged[id(layer)] = layer.merged()
            model = _replaced(model, name, merged[id(layer)])
    return model


def fix_statistics(model: nn.Module) -> None:
    """Change a model's frozen batch normalisation layers so that they always stay in eval mode."""
    for module in model.modules():
        fixed = _FIXED.get(type(module))
        if fixed is None or any(parameter.requires_grad for parameter in module.parameters()):
            continue
        if module.running_mean is not None:
            module.__class__ = fixed
            module.eval()


class _StaysInEval(nn.Module):
    """A layer that `train()` leaves in eval mode."""

    def train(self, mode: bool = True) -> Self:
        """Set eval mode, whatever `mode` is."""
        return super().train(False)


class FixedBatchNorm1d(_StaysInEval, nn.BatchNorm1d):
    """Batch normalisation (1d) that stays in eval mode, with fixed statistics."""


class FixedBatchNorm2d(_StaysInEval, nn.BatchNorm2d):
    """Batch normalisation (2d) that stays in eval mode, with fixed statistics."""


class FixedBatchNorm3d(_StaysInEval, nn.BatchNorm3d):
    """Batch normalisation (3d) that stays in eval mode, with fixed statistics."""


_FIXED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FixedBatchNorm1d,
    nn.BatchNorm2d: FixedBatchNorm2d,
    nn.BatchNorm3d: FixedBatchNorm3d,
}


def matching(patterns: Sequence[str], names: Collection[str], setting: str, kind: str) -> list[str]:
    """Return the names that match a pattern, in the order of `names`.

    Args:
        patterns: shell patterns, such as `head.*`.
        names: the names of parameters or layers.
        setting: the setting with the patterns, for the message.
        kind: noun for what the names name, for the message.

    Raises:
        ModelError: a pattern matches no name.
    """
    matches = {pattern: {n for n in names if fnmatchcase(n, pattern)} for pattern in patterns}
    for pattern, matched in matches.items():
        if not matched:
            problem = f"{setting}: {pattern!r} is no {kind} of the model"
            raise ModelError(f"{problem}{hint_of_names(pattern, names)}")
    chosen = set[str]().union(*matches.values())
    return [name for name in names if name in chosen]


def hint_of_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the closest known name, or known names."""
    names = [other for other in known if other]
    if not names:
        return ""
    return f"; {closest_hint(name, names, f'it has {some_of(names, _MAX_NAMES)}')}"


def _replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replace the module of a name in a model and return the model; "" names the model itself."""
    if not name:
        return layer
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
    return model

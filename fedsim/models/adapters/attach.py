"""Adapters put into a model, and taken out again."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from fedsim.models.adapters.layers import AdaptedLayer, adapted, takes_adapter
from fedsim.models.adapters.settings import LoraSettings
from fedsim.models.errors import ModelError

_MAX_NAMES = 8


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters of a model but those of the patterns.

    Args:
        model: the model.
        patterns: shell patterns of parameter names, such as `head.*`.

    Raises:
        ModelError: a pattern is of no parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ModelError(
                f"model.train: {pattern!r} is no parameter of the model{_hint(pattern, named)}"
            )
    chosen = {id(named[name]) for name in named if _matches(name, patterns)}
    for parameter in named.values():
        parameter.requires_grad_(id(parameter) in chosen)


def add_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """Return a model with an adapter on each target layer that is frozen.

    Factors A are drawn from torch's generator, layer after layer.

    Args:
        model: frozen but for the parameters that train as they are; changed in place.
        settings: rank, scale and targets.

    Raises:
        ModelError: a pattern is of no layer that can get an adapter.
    """
    layers = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if takes_adapter(layer)
    ]
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name, _ in layers):
            raise ModelError(
                f"model.lora.targets: {pattern!r} is no frozen linear, embedding or convolution "
                f"layer of the model{_hint(pattern, [name for name, _ in layers])}"
            )
    made: dict[int, AdaptedLayer] = {}  # a layer with two names has one adapter
    for name, layer in layers:
        if _matches(name, settings.targets):
            if id(layer) not in made:
                made[id(layer)] = adapted(layer, settings.rank, settings.scale)
            model = _replaced(model, name, made[id(layer)])
    return model


def merge_adapters(model: nn.Module) -> nn.Module:
    """Return a model with its adapters added to the weights of plain layers, in place."""
    merged: dict[int, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, AdaptedLayer):
            if id(layer) not in merged:
                merged[id(layer)] = layer.merged()
            model = _replaced(model, name, merged[id(layer)])
    return model


def fix_statistics(model: nn.Module) -> None:
    """Keep frozen batch normalisation in eval mode: a backbone keeps its running statistics."""
    for module in model.modules():
        fixed = _FIXED.get(type(module))
        if fixed is None or any(each.requires_grad for each in module.parameters()):
            continue
        if module.running_mean is not None:
            module.__class__ = fixed
            module.eval()


class _StaysInEval(nn.Module):
    """A layer that `train()` leaves in eval mode."""

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)


class FixedBatchNorm1d(_StaysInEval, nn.BatchNorm1d):
    """Batch normalisation by fixed statistics."""


class FixedBatchNorm2d(_StaysInEval, nn.BatchNorm2d):
    """Batch normalisation by fixed statistics."""


class FixedBatchNorm3d(_StaysInEval, nn.BatchNorm3d):
    """Batch normalisation by fixed statistics."""


_FIXED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FixedBatchNorm1d,
    nn.BatchNorm2d: FixedBatchNorm2d,
    nn.BatchNorm3d: FixedBatchNorm3d,
}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return the model with another module in the place of a name; "" is the model itself."""
    if not name:
        return layer
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
    return model


def _hint(pattern: str, known: Iterable[str]) -> str:
    names = [name for name in known if name]
    close = get_close_matches(pattern, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"; it has {', '.join(names[:_MAX_NAMES])}{more}" if names else ""

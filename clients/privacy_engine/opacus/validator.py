"""`ModuleValidator` with the names of Opacus: layers that mix examples, found and replaced."""

import math
from copy import deepcopy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.clients.model_checks.safety import UnsafeModelError

_GROUPS = 32  # of GroupNorm at most, as Wu and He 2018 found best


class ModuleValidator:
    """Checks and replaces the layers that cannot be trained with example-level privacy.

    Only layers are looked at. Whether forward mixes examples in another way is checked on the first
    forward pass of an attached model.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsafeModelError]:
        """Return an error for each layer that cannot be trained; an empty list if all can.

        Args:
            module: the model.
            strict: whether to raise the first error instead.

        Raises:
            UnsafeModelError: with `strict`, a layer mixes examples or keeps statistics of them.
        """
        errors = [
            UnsafeModelError(f"layer {name!r} ({type(layer).__name__}) {reason}")
            for name, layer in module.named_modules()
            if (reason := _reason(layer)) is not None
        ]
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether no layer has to be replaced."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module) -> nn.Module:
        """Return a copy of the model with every such layer replaced.

        BatchNorm becomes GroupNorm, with fresh weights; InstanceNorm stops its running statistics.
        Make the optimizer from the parameters of the copy.
        """
        fixed = deepcopy(module)
        for name, layer in list(fixed.named_modules()):
            if _reason(layer) is None:
                continue
            if not name:
                return _replaced(layer)
            parent, _, child = name.rpartition(".")
            setattr(fixed.get_submodule(parent), child, _replaced(layer))
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Return `fix(module)` after a check that all of its layers are valid."""
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


def _reason(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm):
        return (
            "mixes the examples of a batch; replace it by "
            f"nn.GroupNorm({_groups(layer)}, {layer.num_features}), as ModuleValidator.fix does"
        )
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics of private examples; set track_running_stats=False"
    return None


def _groups(layer: _BatchNorm) -> int:
    return math.gcd(_GROUPS, layer.num_features)


def _replaced(layer: nn.Module) -> nn.Module:
    if isinstance(layer, _BatchNorm):
        weight = layer.running_mean if layer.weight is None else layer.weight
        device = None if weight is None else weight.device
        dtype = None if weight is None else weight.dtype
        return nn.GroupNorm(
            _groups(layer),
            layer.num_features,
            layer.eps,
            layer.affine,
            device=device,
            dtype=dtype,
        )
    if isinstance(layer, _InstanceNorm):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return layer

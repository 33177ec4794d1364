"""Models that cannot be trained with example-level privacy, refused by name with the fix."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class UnsafeModelError(ValueError):
    """A model whose training would break the per-example guarantee."""


def check_private_model(model: nn.Module, features: Tensor) -> None:
    """Refuse a model in which one example could reach another's gradient, or the state.

    Args:
        model: the model as it will be trained.
        features: any batch of the data's shape (n, ...); only its shape and type are used.

    Raises:
        UnsafeModelError: batch normalisation in train mode, or a buffer that changes in forward.
    """
    training = model.training
    model.train()
    try:
        _refuse_batch_statistics(model)
        _refuse_changing_buffers(
            model, torch.zeros_like(features[:1]).expand(2, *features.shape[1:])
        )
    finally:
        model.train(training)


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"layer {name!r} ({type(module).__name__})"
        if isinstance(module, _BatchNorm) and module.training:
            raise UnsafeModelError(
                f"{where} mixes the examples of a batch and keeps running statistics, so no "
                "per-example guarantee holds; replace it by "
                f"nn.GroupNorm(num_groups, {module.num_features}) or nn.LayerNorm"
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise UnsafeModelError(
                f"{where} keeps running statistics of private examples; "
                "set track_running_stats=False"
            )


def _refuse_changing_buffers(model: nn.Module, batch: Tensor) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        model(batch)
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name not in before or not torch.equal(buffer, before[name])
    ]
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.copy_(before[name])
    if changed:
        raise UnsafeModelError(
            f"buffer {changed[0]!r} changes in forward, so private examples would leave the client "
            "in it without noise; make it a constant, or remove the layer that updates it"
        )

"""Checks that refuse models unfit for example-level privacy; the messages say how to fix them."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.core.errors import InputError
from fedsim.core.formatting import dtype_text


class UnsafeModelError(InputError):
    """Error: training this model would break the per-example privacy guarantee."""


def check_private_model(model: nn.Module, features: Tensor) -> None:
    """Check that no example could change another example's gradient, or a buffer of the model.

    Only layers, buffers and types are checked, in a forward pass on zeros. To compare gradients on
    examples, call `check_isolation`.

    Args:
        model: the model as it will be trained.
        features: a batch of the data's shape (n, ...); only its shape and type are used.

    Guarantee:
        the model's modes and buffers and the global random generators are restored.

    Raises:
        UnsafeModelError: batch normalisation in train mode, a buffer that changes in forward, or a
            trained parameter that is neither float32 nor float64.
    """
    check_parameter_types((n, p) for n, p in model.named_parameters() if p.requires_grad)
    with preserve_state(model):
        model.train()
        _refuse_batch_statistics(model)
        _refuse_changing_buffers(
            model, torch.zeros_like(features[:1]).expand(2, *features.shape[1:])
        )


def check_parameter_types(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that all trained parameters are float32 or float64, as noise needs this precision.

    Args:
        named: pairs (name, tensor) of the trained parameters.

    Raises:
        UnsafeModelError: a parameter is neither float32 nor float64; the message names it.
    """
    for name, parameter in named:
        if parameter.dtype not in (torch.float32, torch.float64):
            kind = dtype_text(parameter.dtype)
            raise UnsafeModelError(
                f"trainable parameters must be float32 or float64, got {kind} ({name!r}): clipped "
                "gradients and noise need that precision; keep the parameters in float32, and run "
                f"the forward pass under torch.autocast for arithmetic in {kind}"
            )


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Return a context that restores modes, buffers and global random generators at its end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = random.getstate()
    # Reading CUDA's states would initialize it; before that, nothing draws from it.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def find_batch_norm(model: nn.Module) -> tuple[str, _BatchNorm] | None:
    """Return the name and module of the first layer that normalises over the batch, or None."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return name, module
    return None


def _refuse_batch_statistics(model: nn.Module) -> None:
    batch_norm = find_batch_norm(model)
    if batch_norm is not None:
        name, module = batch_norm
        raise UnsafeModelError(
            f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch and keeps "
            "running statistics, so no per-example guarantee holds; replace it by "
            f"nn.GroupNorm(num_groups, {module.num_features}) or nn.LayerNorm"
        )
    for name, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise UnsafeModelError(
                f"layer {name!r} ({type(module).__name__}) keeps running statistics of private "
                "examples; set track_running_stats=False"
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
    if changed:
        raise UnsafeModelError(
            f"buffer {changed[0]!r} changes in forward, so it would carry private examples out of "
            "the client without noise; make it a constant, or remove the layer that updates it"
        )

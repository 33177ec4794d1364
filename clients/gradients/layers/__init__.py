"""Table of layer rules: functions that compute per-example gradients, one for each type of module.

A rule runs a module on a padded batch and records each call as a `LayerUse`, which computes the
per-example gradients. The rule returns None for a call that it does not cover, and the module then
runs through `torch.func`. A new rule needs a function here, and a tested subclass of `LayerUse` if
none of those here fits.

Gradient norms are never under-estimated. If per-example gradients are held in memory, their norms
are computed in float64 from the values that are released. The gradients of a large linear layer on
sequences are not held in memory. Their norms include a bound on all rounding errors, those of the
norm and those of the released sum (Higham 2002, section 3.1).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.affine import AffineUse
from fedsim.clients.gradients.layers.base import LayerUse, Operand
from fedsim.clients.gradients.layers.convolution import ConvolutionUse, Geometry
from fedsim.clients.gradients.layers.embedding import EmbeddingUse
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.layers.recurrent import run_cell, run_layers


class Recorder(Protocol):
    """Protocol of the object with which a layer rule records layer calls."""

    def operand(self, parameter: Tensor) -> Operand:
        """Return a parameter with its values for all clients of the padded batch."""
        ...

    def record(self, use: LayerUse, x: Tensor) -> Tensor:
        """Return the output of a layer call, and record the call.

        Args:
            use: the layer call, with the layer's parameters.
            x: input of the layer (n, ...), one row per example.
        """
        ...


Rule = Callable[..., Any]
"""Function of a recorder, a module and its arguments that returns the module's output.

It returns None for a call that it does not cover.
"""


def _operand(recorder: Recorder, parameter: Tensor | None) -> Operand | None:
    return None if parameter is None else recorder.operand(parameter)


def _linear(recorder: Recorder, module: nn.Linear, input: Tensor) -> Tensor:
    use = LinearUse(recorder.operand(module.weight), _operand(recorder, module.bias))
    return recorder.record(use, input)


def _convolution(
    recorder: Recorder, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor
) -> Tensor | None:
    if module.groups > 1 or module.padding_mode != "zeros" or input.ndim != module.weight.ndim:
        return None
    kernel, dilation = module.kernel_size, module.dilation
    if module.padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in reach)
    elif module.padding == "valid":
        padding = ((0, 0),) * len(kernel)
    else:
        padding = tuple((int(side), int(side)) for side in module.padding)
    geometry = Geometry(kernel, module.stride, dilation, padding)
    weight, bias = recorder.operand(module.weight), _operand(recorder, module.bias)
    return recorder.record(ConvolutionUse(weight, bias, geometry), input)


def _embedding(recorder: Recorder, module: nn.Embedding, input: Tensor) -> Tensor | None:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return None
    return recorder.record(EmbeddingUse(recorder.operand(module.weight), module.padding_idx), input)


def _embedding_bag(
    recorder: Recorder,
    module: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor | None:
    if input.ndim != 2 or offsets is not None or per_sample_weights is not None:
        return None
    if module.mode == "max" or module.max_norm is not None or module.scale_grad_by_freq:
        return None
    padding = module.padding_idx
    vectors = recorder.record(EmbeddingUse(recorder.operand(module.weight), padding), input)
    if padding is None:
        return vectors.sum(1) if module.mode == "sum" else vectors.mean(1)
    present = (input != padding).unsqueeze(2)
    total = vectors.masked_fill(~present, 0).sum(1)
    return total if module.mode == "sum" else total / present.sum(1).clamp(min=1)


def _affine(
    recorder: Recorder, module: Any, plain: Tensor, *, dimensions: int = 0, bias: bool = True
) -> Tensor:
    """Return a normalised input, scaled and shifted by the module's parameters if it has any."""
    w, b = module.weight, module.bias if bias else None
    if w is None and b is None:
        return plain
    use = AffineUse(_operand(recorder, w), _operand(recorder, b), dimensions)
    return recorder.record(use, plain)


def _layer_norm(recorder: Recorder, module: nn.LayerNorm, input: Tensor) -> Tensor:
    plain = functional.layer_norm(input, module.normalized_shape, eps=module.eps)
    return _affine(recorder, module, plain)


def _rms_norm(recorder: Recorder, module: nn.RMSNorm, input: Tensor) -> Tensor:
    plain = functional.rms_norm(input, module.normalized_shape, eps=module.eps)
    return _affine(recorder, module, plain, bias=False)


def _group_norm(recorder: Recorder, module: nn.GroupNorm, input: Tensor) -> Tensor:
    plain = functional.group_norm(input, module.num_groups, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def _instance_norm(recorder: Recorder, module: Any, input: Tensor) -> Tensor | None:
    if module.track_running_stats or input.ndim != _DIMENSIONS[type(module)]:
        return None
    plain = functional.instance_norm(input, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def _batch_norm(recorder: Recorder, module: Any, input: Tensor) -> Tensor | None:
    if module.training or module.running_mean is None:  # couples the examples
        return None
    mean, variance = module.running_mean, module.running_var
    plain = functional.batch_norm(input, mean, variance, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def _prelu(recorder: Recorder, module: nn.PReLU, input: Tensor) -> Tensor:
    weight, dimensions = recorder.operand(module.weight), max(0, input.ndim - 2)
    if module.num_parameters == 1:  # one slope for all channels
        weight, dimensions = weight.reshape(), input.ndim - 1
    use = AffineUse(weight, None, dimensions)
    return functional.relu(input) + recorder.record(use, input.clamp(max=0))


def _recurrent(run: Callable[..., Any]) -> Rule:
    def rule(recorder: Recorder, module: Any, input: Any, state: Any = None) -> Any:
        layers = isinstance(module, nn.RNNBase)
        if not isinstance(input, Tensor) or input.ndim != (3 if layers else 2):
            return None
        if layers and module.proj_size:
            return None

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            use = LinearUse(recorder.operand(weight), _operand(recorder, bias))
            return recorder.record(use, x)

        return run(linear, module, input, state)

    return rule


_DIMENSIONS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Exactly these types: a subclass may compute something else.
RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys(_DIMENSIONS, _instance_norm),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent(run_layers)),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _recurrent(run_cell)),
}

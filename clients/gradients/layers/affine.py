"""Per-example gradients of scales and shifts: parameters of normalisation layers and of PReLU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.clients.gradients.layers.base import LayerUse, Operand, Recorder, optional_operand

INSTANCE_NORMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}
"""Types of instance normalisation, with the dimensions of an input with a row per example."""


class AffineUse(LayerUse):
    """One call of a scale w and a shift b on an input x: the output is x · w + b.

    w and b have shape (d...), and x has shape (n, ..., d..., *after).

    Args:
        weight: the scale w; with None, the scale is 1.
        bias: the shift b; with None, the shift is 0.
        dimensions: number of dimensions in `after`, such as 2 for images with channels first.
    """

    def __init__(self, weight: Operand | None, bias: Operand | None, dimensions: int = 0) -> None:
        super().__init__(weight, bias)
        self._after = dimensions

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (n, ...) for the input x (n, ...)."""
        rows = x.unflatten(0, (self.clients, -1))
        w, b = (None if p is None else self._spread(p.values, x) for p in (self.weight, self.bias))
        if w is None:
            y = rows.clone() if b is None else rows + b
        else:
            y = rows * w if b is None else torch.addcmul(b, rows, w)
        return y.flatten(0, 1)

    def input_gradient(self, g: Tensor) -> Tensor:
        """Return the gradient at the layer's input, given the gradient g at its output."""
        if self.weight is None:
            return g
        rows = g.unflatten(0, (self.clients, -1))
        return (rows * self._spread(self.weight.values, g)).flatten(0, 1)

    def compute(self, index: int) -> Tensor:
        """Return the per-example gradients (n, *shape) of the parameter with the given index."""
        g = self.output_gradient
        values = g * self.input if index == self.weight_index else g
        last = g.ndim - self._after
        first = last - (self.operand.values.ndim - 1)
        summed = [*range(1, first), *range(last, g.ndim)]
        return values.sum(summed) if summed else values

    def _spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Return values (K, d...) in a shape that broadcasts over (K, R, ..., d..., after)."""
        shape = values.shape[1:]
        before = x.ndim - self._after - len(shape)
        return values.reshape(len(values), *[1] * before, *shape, *[1] * self._after)


def _affine(
    recorder: Recorder, module: Any, plain: Tensor, *, dimensions: int = 0, bias: bool = True
) -> Tensor:
    """Return a normalised input, scaled and shifted by the module's parameters if it has any."""
    w, b = module.weight, module.bias if bias else None
    if w is None and b is None:
        return plain
    use = AffineUse(optional_operand(recorder, w), optional_operand(recorder, b), dimensions)
    return recorder.record(use, plain)


def layer_norm_rule(recorder: Recorder, module: nn.LayerNorm, input: Tensor) -> Tensor:
    """Layer rule of `nn.LayerNorm`."""
    plain = functional.layer_norm(input, module.normalized_shape, eps=module.eps)
    return _affine(recorder, module, plain)


def rms_norm_rule(recorder: Recorder, module: nn.RMSNorm, input: Tensor) -> Tensor:
    """Layer rule of `nn.RMSNorm`."""
    plain = functional.rms_norm(input, module.normalized_shape, eps=module.eps)
    return _affine(recorder, module, plain, bias=False)


def group_norm_rule(recorder: Recorder, module: nn.GroupNorm, input: Tensor) -> Tensor:
    """Layer rule of `nn.GroupNorm`."""
    plain = functional.group_norm(input, module.num_groups, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def instance_norm_rule(recorder: Recorder, module: Any, input: Tensor) -> Tensor | None:
    """Layer rule of instance normalisation without running statistics."""
    if module.track_running_stats or input.ndim != INSTANCE_NORMS[type(module)]:
        return None
    plain = functional.instance_norm(input, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def batch_norm_rule(recorder: Recorder, module: Any, input: Tensor) -> Tensor | None:
    """Layer rule of batch normalisation with fixed statistics."""
    if module.training or module.running_mean is None:  # couples the examples
        return None
    mean, variance = module.running_mean, module.running_var
    plain = functional.batch_norm(input, mean, variance, eps=module.eps)
    return _affine(recorder, module, plain, dimensions=input.ndim - 2)


def prelu_rule(recorder: Recorder, module: nn.PReLU, input: Tensor) -> Tensor:
    """Layer rule of `nn.PReLU`."""
    weight, dimensions = recorder.operand(module.weight), max(0, input.ndim - 2)
    if module.num_parameters == 1:  # one slope for all channels
        weight, dimensions = weight.reshape(), input.ndim - 1
    use = AffineUse(weight, None, dimensions)
    return functional.relu(input) + recorder.record(use, input.clamp(max=0))

"""Records how a model uses its parameters, while it runs unchanged.

Inside `Tape`, every torch operation that takes a tracked parameter is routed to a `Use`, whose
backward pass notes the gradient of its output and makes no weight gradient. Each call has a record
of its own, so layers may be reused and forwards may interleave. An operation that uses a tracked
parameter in a way that no `Use` covers is noted in `uncovered`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsim.clients.dp_sgd.uses import AffineUse, ConvolutionUse, EmbeddingUse, LinearUse, Use


class Tape(TorchFunctionMode):
    """Notes the uses of tracked parameters during one forward pass of `examples` examples.

    Args:
        index: parameter index by `id`.
        examples: number of examples n; every input of a use must be (n, ...).
    """

    def __init__(self, index: dict[int, int], examples: int) -> None:
        super().__init__()
        self._index = index
        self._examples = examples
        self._anchor = torch.zeros((), requires_grad=True)
        self.uses: list[Use] = []
        self.uncovered: set[int] = set()

    def backward(self, loss: Tensor) -> None:
        """Fill every use that contributed to `loss` with the gradient of its output."""
        if loss.requires_grad:
            torch.autograd.grad(loss, self._anchor, allow_unused=True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        index = self._index
        tracked = [
            part
            for value in (*args, *kwargs.values())
            for part in (value if isinstance(value, list | tuple) else (value,))
            if id(part) in index
        ]
        if not tracked:
            return func(*args, **kwargs)
        route = _ROUTES.get(func)
        output = None if route is None else route(self, *args, **kwargs)
        if output is not None:
            return output
        if func not in _HARMLESS:
            self.uncovered.update(index[id(part)] for part in tracked)
        return func(*args, **kwargs)

    def tracked(self, parameter: Tensor | None) -> int | None:
        """Return the index of a tracked parameter, else None."""
        return None if parameter is None else self._index.get(id(parameter))

    def record(self, use: Use, x: Tensor) -> Tensor | None:
        """Run a use on its input and note it; None where the input is not one row per example."""
        if x.ndim == 0 or len(x) != self._examples:
            return None
        return _Recorded.apply(self._anchor, x, use, self)  # pyright: ignore[reportReturnType]


class _Recorded(torch.autograd.Function):
    """Runs a use and notes it on the tape in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, use: Use, tape: Tape) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.use, ctx.tape = use, tape
        ctx.save_for_backward(x)
        return use.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        use: Use = ctx.use
        use.input, use.output_gradient = x, g
        ctx.tape.uses.append(use)
        return None, use.input_gradient(x, g) if ctx.needs_input_grad[1] else None, None, None


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


def _linear(
    tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    if tape.tracked(input) is not None:
        return None
    use = LinearUse(tape.tracked(weight), tape.tracked(bias), weight.detach(), _detached(bias))
    return tape.record(use, input)


def _convolution(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor | None:
    dimensions = weight.ndim - 2
    if input.ndim != weight.ndim or tape.tracked(input) is not None:
        return None
    spread = _each(dilation, dimensions)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
        sides = [side for total in reversed(reach) for side in (total // 2, total - total // 2)]
        input, padding = functional.pad(input, sides), 0
    elif padding == "valid":
        padding = 0
    use = ConvolutionUse(
        tape.tracked(weight),
        tape.tracked(bias),
        weight.detach(),
        _detached(bias),
        stride=_each(stride, dimensions),
        padding=_each(padding, dimensions),
        dilation=spread,
        groups=groups,
    )
    return tape.record(use, input)


def _each(value: Any, dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else list(value)


def _embedding(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    index = tape.tracked(weight)
    if index is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return tape.record(EmbeddingUse(index, weight.detach(), padding_idx), input)


def _affine(tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    use = AffineUse(
        tape.tracked(weight), tape.tracked(bias), _detached(weight), _detached(bias)
    )
    return tape.record(use, x)


def _layer_norm(
    tape: Tape,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    return _affine(tape, functional.layer_norm(input, normalized_shape, eps=eps), weight, bias)


def _rms_norm(
    tape: Tape,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    return _affine(tape, functional.rms_norm(input, normalized_shape, eps=eps), weight, None)


def _group_norm(
    tape: Tape,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    shape = (-1,) + (1,) * (input.ndim - 2)
    plain = functional.group_norm(input, num_groups, eps=eps)
    use = AffineUse(
        tape.tracked(weight),
        tape.tracked(bias),
        None if weight is None else weight.detach().view(shape),
        None if bias is None else bias.detach().view(shape),
    )
    return tape.record(use, plain)


def _add(tape: Tape, input: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
    pair = _parameter_and_rows(tape, input, other)
    if pair is None or alpha != 1:
        return None
    parameter, rows = pair
    return _affine(tape, rows, None, parameter)


def _multiply(tape: Tape, input: Any, other: Any) -> Tensor | None:
    pair = _parameter_and_rows(tape, input, other)
    if pair is None:
        return None
    parameter, rows = pair
    return _affine(tape, rows, parameter, None)


def _parameter_and_rows(tape: Tape, one: Any, two: Any) -> tuple[Tensor, Tensor] | None:
    """Split the operands into a tracked parameter and (n, ...) that it is broadcast over."""
    for parameter, rows in ((one, two), (two, one)):
        if tape.tracked(parameter) is None or not isinstance(rows, Tensor):
            continue
        across = parameter.ndim < rows.ndim or (
            parameter.ndim == rows.ndim and parameter.shape[0] == 1
        )
        if across and torch.broadcast_shapes(parameter.shape, rows.shape) == rows.shape:
            return parameter, rows
    return None


_ROUTES: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    torch.mul: _multiply,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    Tensor.__rmul__: _multiply,
}

# What reads a parameter's layout and not its values.
_HARMLESS = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
    Tensor.detach,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout",
                     "grad", "is_nested", "is_sparse", "data")
    ),
}

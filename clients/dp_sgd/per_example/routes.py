"""Which operations with a tracked parameter become which use.

A route returns None for what it does not cover; the operation then runs as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.affine_routes import (
    AFFINE_ROUTES,
    detached,
    needs_no_gradient,
)
from fedsim.clients.dp_sgd.per_example.layers import ConvolutionUse, EmbeddingUse, LinearUse
from fedsim.clients.dp_sgd.per_example.recorder import Recorder
from fedsim.clients.dp_sgd.per_example.recurrent import CELLS, cell_route, layers_route


def _linear(
    tape: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    if tape.tracked(input) is not None or not needs_no_gradient(tape, weight, bias):
        return None
    use = LinearUse(tape.tracked(weight), tape.tracked(bias), weight.detach(), detached(bias))
    return tape.record(use, input)


def _convolution(
    tape: Recorder,
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
    if not needs_no_gradient(tape, weight, bias):
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
        detached(bias),
        stride=_each(stride, dimensions),
        padding=_each(padding, dimensions),
        dilation=spread,
        groups=groups,
    )
    return tape.record(use, input)


def _each(value: Any, dimensions: int) -> list[int]:
    if isinstance(value, int):
        return [value] * dimensions
    return list(value) * (dimensions // len(value))


def _embedding(
    tape: Recorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    index = tape.tracked(weight)
    if index is None or max_norm is not None or scale_grad_by_freq:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return tape.record(EmbeddingUse(index, weight.detach(), padding_idx), input)


def _linear_or_frozen(
    tape: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    if tape.tracked(weight) is None and tape.tracked(bias) is None:
        return functional.linear(input, weight, bias)
    return _linear(tape, input, weight, bias)


ROUTES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    functional.embedding: _embedding,
    **AFFINE_ROUTES,
    **{getattr(torch, kind): layers_route(kind, _linear_or_frozen) for kind in CELLS},
    **{getattr(torch, f"{kind}_cell"): cell_route(kind, _linear_or_frozen) for kind in CELLS},
}
"""Operations whose parameters are tracked, and the functions that make a use of them."""

HARMLESS: frozenset[Any] = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.stride,
        Tensor.is_floating_point,
        Tensor.detach,
        Tensor.__len__,
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "requires_grad",
                "is_cuda",
                "layout",
                "grad",
                "is_nested",
                "is_sparse",
                "data",
            )
        ),
    }
)
"""What reads a parameter's layout and not its values."""

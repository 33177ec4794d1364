"""Operations that scale and shift by tracked parameters: norms, and bare parameters.

A route returns None for what it does not cover; the operation then runs as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.layers import AffineUse
from fedsim.clients.dp_sgd.per_example.recorder import Recorder


def needs_no_gradient(tape: Recorder, *parameters: Tensor | None) -> bool:
    """Tell whether what is not tracked needs no gradient: a use would swallow it."""
    return all(p is None or tape.tracked(p) is not None or not p.requires_grad for p in parameters)


def detached(value: Tensor | None) -> Tensor | None:
    """Return the values without their gradient, None for None."""
    return None if value is None else value.detach()


def _affine(
    tape: Recorder,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dimensions: int | None = None,
) -> Tensor | None:
    """Record x · weight + bias; `dimensions` of x after the channels, where those are second."""
    if not needs_no_gradient(tape, weight, bias):
        return None
    given = weight if weight is not None else bias
    w, b = detached(weight), detached(bias)
    if dimensions is not None:
        shape = (-1,) + (1,) * dimensions
        w, b = (None if p is None else p.reshape(shape) for p in (w, b))
    shape = None if given is None else given.shape
    return tape.record(AffineUse(tape.tracked(weight), tape.tracked(bias), w, b, shape), x)


def _layer_norm(
    tape: Recorder,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    return _affine(tape, functional.layer_norm(input, normalized_shape, eps=eps), weight, bias)


def _rms_norm(
    tape: Recorder,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    return _affine(tape, functional.rms_norm(input, normalized_shape, eps=eps), weight, None)


def _group_norm(
    tape: Recorder,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    plain = functional.group_norm(input, num_groups, eps=eps)
    return _affine(tape, plain, weight, bias, input.ndim - 2)


def _batch_norm(
    tape: Recorder,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if training:  # couples the examples
        return None
    plain = functional.batch_norm(input, running_mean, running_var, eps=eps)
    return _affine(tape, plain, weight, bias, input.ndim - 2)


def _instance_norm(
    tape: Recorder,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    plain = functional.instance_norm(
        input, running_mean, running_var, None, None, use_input_stats, momentum, eps
    )
    return _affine(tape, plain, weight, bias, input.ndim - 2)


def _prelu(tape: Recorder, input: Tensor, weight: Tensor) -> Tensor | None:
    if tape.tracked(weight) is None or tape.tracked(input) is not None:
        return None
    below = input.clamp(max=0)
    slope = _affine(tape, below, weight, None, max(0, input.ndim - 2) if len(weight) > 1 else None)
    return None if slope is None else functional.relu(input) + slope


def _add(tape: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
    pair = _parameter_and_rows(tape, input, other)
    return None if pair is None or alpha != 1 else _affine(tape, pair[1], None, pair[0])


def _add_in_place(tape: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Tensor | None:
    if tape.tracked(other) is None:
        return None
    output = _add(tape, input, other, alpha=alpha)
    return None if output is None else input.copy_(output)


def _multiply(tape: Recorder, input: Any, other: Any) -> Tensor | None:
    pair = _parameter_and_rows(tape, input, other)
    return None if pair is None else _affine(tape, pair[1], pair[0], None)


def _parameter_and_rows(tape: Recorder, one: Any, two: Any) -> tuple[Tensor, Tensor] | None:
    """Split the operands into a tracked parameter and (n, ...) that it is broadcast over."""
    for parameter, rows in ((one, two), (two, one)):
        if tape.tracked(parameter) is None or not isinstance(rows, Tensor):
            continue
        if tape.tracked(rows) is None and _spreads(parameter.shape, rows.shape):
            return parameter, rows
    return None


def _expand(tape: Recorder, input: Tensor, *sizes: Any) -> Tensor | None:
    """A token or a query that every example gets: a shift of zeros."""
    if tape.tracked(input) is None:
        return None
    shape = input.detach().expand(*sizes).shape
    if not _spreads(input.shape, shape):
        return None
    return _affine(tape, input.new_zeros(shape), None, input)


def _repeat(tape: Recorder, input: Tensor, *sizes: Any) -> Tensor | None:
    times = sizes if isinstance(sizes[0], int) else tuple(sizes[0])
    added = len(times) - input.ndim
    if tape.tracked(input) is None or any(count != 1 for count in times[1:]):
        return None
    if added > 0:
        return _expand(tape, input, times[0], *(1,) * (added - 1), *input.shape)
    return _expand(tape, input, times[0], *input.shape[1:]) if input.shape[:1] == (1,) else None


def _spreads(small: torch.Size, large: torch.Size) -> bool:
    """Tell whether a parameter is broadcast to `large`, and over its first dimension."""
    across = len(small) < len(large) or (len(small) == len(large) > 0 and small[0] == 1)
    try:
        return across and torch.broadcast_shapes(small, large) == large
    except RuntimeError:
        return False


AFFINE_ROUTES: dict[Any, Callable[..., Tensor | None]] = {
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.prelu: _prelu,
    torch.prelu: _prelu,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add_in_place),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _multiply),
    Tensor.expand: _expand,
    Tensor.repeat: _repeat,
}
"""Operations that scale or shift, and the functions that make a use of them."""

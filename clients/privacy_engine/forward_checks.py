"""Calls of a model on padded batches, and checks that the model does not mix examples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.clients.gradients.choice import BackendError, gradients_for
from fedsim.clients.gradients.padded_batches import padded_parts
from fedsim.clients.gradients.per_example import UncoveredParameterError
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.model_checks.bit_isolation import RowIsolation, other_rows
from fedsim.clients.model_checks.isolation import Probe, ProbeBatch
from fedsim.clients.model_checks.isolation import rows as tensor_rows
from fedsim.clients.model_checks.safety import UnsafeModelError, check_private_model, preserve_state
from fedsim.core.formatting import dtype_text

_NUM_SYNTHETIC_EXAMPLES = 3


def leading_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first tensor in a model's arguments; its first dimension is the examples.

    Args:
        args: positional arguments of a call of the model.
        kwargs: keyword arguments of the call.

    Raises:
        TypeError: no argument contains a tensor with at least one dimension.
    """
    if args and isinstance(args[0], Tensor) and args[0].ndim:
        return args[0]
    first = next((t for t in all_tensors([*args, *kwargs.values()]) if t.ndim), None)
    if first is None:
        raise TypeError(
            "an attached model needs an input tensor whose first dimension is the examples, got "
            f"({', '.join(type(value).__name__ for value in [*args, *kwargs.values()])})"
        )
    return first


def check_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    padded_examples: int,
    views: int = 1,
    public: bool = False,
) -> tuple[Sequence[str], int]:
    """Check that a model does not mix examples and that it has per-example gradients.

    The per-example gradients of a fixed function of the outputs are compared with the gradients of
    each example alone. Some models mix examples only in large batches. So in a padded batch of the
    size that will run, no bit of an example's contribution may depend on other rows.

    Args:
        model: the model; parameters, modes, buffers and global random generators are restored.
        args: positional arguments of a call; the first tensor holds the examples.
        kwargs: keyword arguments of the call.
        padded_examples: requested number of examples in a padded batch.
        views: number of successive rows of each example.
        public: whether the values of the arguments are public. If not, only their shapes and dtypes
            are used, with synthetic examples.

    Returns:
        Names of the modules that run through `torch.func` because they have no layer rule. And the
        number of examples in a padded batch in which examples do not mix, at most
        `padded_examples`.

    Raises:
        UnsafeModelError: the model has batch normalisation, a buffer that changes in forward, or
            outputs that depend on other examples.
        UncoveredParameterError: a parameter has no per-example gradients; the message names the
            parameters or the layer.
        ValueError: the model does not run on synthetic examples.
    """
    first = leading_tensor(args, kwargs)
    single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    call = model if single else _Call(model, args, kwargs, len(first), public)
    examples = first[:_NUM_SYNTHETIC_EXAMPLES].detach() if public else _synthetic(first)
    if examples.dtype in (torch.bfloat16, torch.float16):  # for autocast, which is off here
        examples = examples.float()
    with (
        values_in_place(model),
        _with_advice(model, first, public),
        torch.autocast(first.device.type, enabled=False),
    ):
        check_private_model(call, examples)
        targets = torch.zeros(len(examples))
        chosen = gradients_for(call, _fixed_function, examples, targets, rules_only=True)
        units = chosen.units if isinstance(chosen, RuleGradients) else ()
        if call is not model and "" in units:
            raise BackendError("other arguments than the first tensor are not taken apart by row")
        _check_training_mode(call, examples, padded_examples * views)
        isolation = RowIsolation(chosen, examples, targets)
        height = isolation.height(1, padded_examples, most=padded_examples, unit=views)
    return units if call is model else [unit.partition(".")[2] for unit in units], height


def _check_training_mode(call: nn.Module, examples: Tensor, rows: int) -> None:
    """Check that in training mode the outputs of a row do not depend on other rows, by any bit."""
    half = rows // 2
    if not half:
        return
    x = examples[torch.arange(rows, device=examples.device) % len(examples)]
    targets = torch.zeros(rows, device=examples.device)
    with preserve_state(call), torch.no_grad():
        call.train()
        probe = Probe(call, _fixed_function)

        def watched(features: Tensor) -> list[Tensor]:
            outputs = tensor_rows(probe.outputs(ProbeBatch(features, targets)), rows)
            return [value[half:].nan_to_num() for value in outputs]

        expected = watched(x)
        kept = torch.arange(rows, device=x.device) >= half
        for _, others, _ in other_rows(x, targets, kept, signs=2):
            if not all(map(torch.equal, watched(others), expected)):
                raise UnsafeModelError(
                    f"in training, with {rows} rows, the outputs of an example change with the "
                    "other examples; compute for each example alone, along other dimensions than "
                    "the first"
                )


class _Call(nn.Module):
    """A model as a function of its first tensor; other tensors are expanded to as many rows."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        examples: int,
        public: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self._args, self._kwargs = args, kwargs
        self._examples, self._public = examples, public

    def forward(self, first: Tensor) -> Any:
        """Call the model with `first` as its first tensor, and the others with as many rows."""
        given = iter([first])

        def replaced(value: Tensor) -> Tensor:
            if value.ndim == 0 or len(value) != self._examples:
                return value
            row = value[:1] if self._public else value.new_zeros(1, *value.shape[1:])
            return next(given, row.expand(len(first), *value.shape[1:]))

        args = tuple(map_tensors(value, replaced) for value in self._args)
        kwargs = {name: map_tensors(value, replaced) for name, value in self._kwargs.items()}
        return self.model(*args, **kwargs)


def _fixed_function(outputs: Any, targets: Tensor) -> Tensor:
    """Return one value per example (n,) that depends on all outputs of the example."""
    by_rows = tensor_rows(outputs, len(targets))
    if not by_rows:
        raise UnsafeModelError(
            "the model's outputs have no row for each example, so it cannot be checked that "
            "examples are kept apart; return one row per example and compute the loss outside"
        )
    parts = [value.reshape(len(targets), -1) for value in by_rows]
    weights = [torch.arange(1.0, part.shape[1] + 1).cos().to(part) for part in parts]
    return sum(
        ((part * weight).sum(1) for part, weight in zip(parts, weights, strict=True)),
        start=parts[0].new_zeros(len(targets)),
    )


def _synthetic(like: Tensor) -> Tensor:
    # Independent of private values; positive, as inputs of roots and logarithms must be.
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_SYNTHETIC_EXAMPLES, *like.shape[1:])
    if like.is_floating_point():
        return torch.rand(shape, generator=generator).to(like)
    return torch.randint(0, 2, shape, generator=generator).to(like)


@contextmanager
def values_in_place(model: nn.Module) -> Iterator[None]:
    """Restore the memory of the parameters afterwards, as backends move them to a flat tensor."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


@contextmanager
def _with_advice(model: nn.Module, first: Tensor, public: bool) -> Iterator[None]:
    """Convert the errors of a check into errors that name the fix."""
    try:
        yield
    except UnsafeModelError:
        raise
    except BackendError as error:
        if isinstance(error.__cause__, UnsafeModelError):
            raise error.__cause__ from None
        raise UncoveredParameterError(
            f"no per-example gradients: {error}. Parameters must be used by layers that have a "
            "rule (Linear, Conv, Embedding, LayerNorm, GroupNorm, RMSNorm) or that vmap can run, "
            "with the examples in the first dimension of the model's inputs and "
            "outputs; freeze others (requires_grad_(False)) before the engine is made"
        ) from error
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        _refuse_other_type(model, first, error)
        if public:
            raise
        raise ValueError(
            "the model cannot be checked, as it does not run on synthetic examples of shape "
            f"{tuple(first.shape[1:])} ({type(error).__name__}: {error}); call "
            "engine.check_model(inputs) with a few public examples before training"
        ) from error


def _refuse_other_type(model: nn.Module, first: Tensor, error: Exception) -> None:
    """Raise an error that names the dtypes if the model's and the inputs' dtypes differ."""
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if not first.is_floating_point() or first.dtype in kinds or len(kinds) != 1:
        return
    model_kind, kind = map(dtype_text, (kinds.pop(), first.dtype))
    raise ValueError(
        f"the model's parameters are {model_kind} and its inputs are {kind}, on which it fails "
        f"({type(error).__name__}: {error}); convert the inputs with x.to(torch.{model_kind}), or "
        f"the model with model.to(torch.{kind}) before the engine and the optimizer are made"
    ) from error


def all_tensors(values: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and mappings, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from all_tensors(value)
    elif isinstance(values, Mapping):
        yield from all_tensors(list(values.values()))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to each tensor in nested lists, tuples and mappings; return the result."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


Layout = dict[tuple[int, int], bool]
"""(number of tensors in a call, position of a tensor) → whether it has a row for each example."""


def call_in_padded_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], n: int, rows: int, layout: Layout
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of a model's call for each padded batch in turn.

    Tensors with a row for each example are cut and padded with zeros; all other values are passed
    whole. The first call decides which tensors have rows, because another tensor, such as a table
    of classes, may by chance be as long as a later batch.

    Args:
        args: positional arguments of the whole call.
        kwargs: keyword arguments of the whole call.
        n: number of rows of the whole call.
        rows: number of rows of a padded batch.
        layout: record of which tensors have rows; the first call fills it in.

    Raises:
        UncoveredParameterError: an argument that had a row for each example no longer has them.
    """
    tensors = list(all_tensors((args, kwargs)))
    for place, value in enumerate(tensors):
        has_rows = value.ndim > 0 and len(value) == n
        if layout.setdefault((len(tensors), place), has_rows) and not has_rows:
            raise UncoveredParameterError(
                f"an argument of the model has shape {tuple(value.shape)} for {n} rows; it had a "
                "row for each example before, so either give it one, or keep it in the model"
            )
    for start in range(0, n, rows):
        places = iter(range(len(tensors)))

        def cut(value: Tensor, start: int = start, places: Iterator[int] = places) -> Tensor:
            if not layout[len(tensors), next(places)]:
                return value
            return padded_parts(value[start : start + rows], rows)[0]

        yield map_tensors((args, kwargs), cut)


def join_outputs(parts_outputs: Sequence[Any], n: int, rows: int) -> Any:
    """Join the outputs for all padded batches into the outputs of one call with n rows.

    Args:
        parts_outputs: outputs for each padded batch.
        n: number of rows of the whole call.
        rows: number of rows of a padded batch.

    Raises:
        UnsafeModelError: an output tensor does not have one row for each row of the input.
    """
    flat = [pytree.tree_flatten(outputs) for outputs in parts_outputs]
    joined = [_join(parts, n, rows) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, flat[0][1])


def _join(parts: Sequence[Any], n: int, rows: int) -> Any:
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    if first.ndim == 0 or len(first) != rows:
        raise UnsafeModelError(
            f"the model returns a tensor of shape {tuple(first.shape)} for {rows} rows: it has no "
            "row for each example, so it may mix them; return tensors with one row for each "
            "example, and compute the loss outside"
        )
    whole = torch.cat(list(parts)) if len(parts) > 1 else first
    return whole if len(whole) == n else whole[:n]

"""Losses that the caller reduces to one value, with the value of each example kept.

Scripts call `criterion(model(x), y).backward()`. What reaches the engine of that backward pass is a
gradient, which does not show whether the loss kept examples apart. So the outputs of an attached
model are `ModelOutput`s: a loss function of torch that is called with one is computed for each
example, then reduced. The result remembers its parts, and `backward()` of the result is
`engine.backward(parts)`. Everything else that is computed from outputs is as without an engine.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of an attached model.

    Attributes:
        rows: of the model's input and outputs.
        backward: runs backward through one loss for each row.
    """

    rows: int
    backward: Callable[[Tensor], None]


class ModelOutput(Tensor):
    """An output of an attached model, or what was computed from one.

    Attributes:
        origin: the forward pass.
        losses: of a loss that was reduced to one value, the value of each row (n,).
    """

    origin: ForwardPass | None = None
    losses: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and keep the parts of a loss that it reduces."""
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        found = None if rule is None else rule(func, args, kwargs)
        if found is not None:
            return found.value
        return _noted(_plain(func, args, kwargs), _origin(args, kwargs))


def with_origin(outputs: Any, origin: ForwardPass) -> Any:
    """Return nested outputs of a model whose tensors remember the forward pass.

    Args:
        outputs: plain tensors.
        origin: the forward pass.
    """
    return pytree.tree_map_only(Tensor, lambda value: _noted(value, origin), outputs)


def without_origin(value: Tensor) -> Tensor:
    """Return the same tensor as a plain one."""
    return _plain(Tensor.as_subclass, (value, Tensor), {}) if type(value) is not Tensor else value


@dataclass(frozen=True)
class _Found:
    """The result of a rule; a rule that does not apply returns None instead."""

    value: Any


_Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], _Found | None]


def _plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as if every `ModelOutput` were a plain tensor."""
    return Tensor.__torch_function__(func, (), args, kwargs)


def _origin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPass | None:
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, ModelOutput) and value.origin is not None:
            return value.origin
    return None


def _noted(result: Any, origin: ForwardPass | None, losses: Tensor | None = None) -> Any:
    """Return results that remember a forward pass, if gradients flow through them."""
    if not isinstance(result, Tensor):
        return pytree.tree_map_only(Tensor, lambda value: _noted(value, origin), result)
    if not isinstance(result, ModelOutput):
        if type(result) is not Tensor or not result.requires_grad:
            return result
        result = result.as_subclass(ModelOutput)
    result.origin, result.losses = origin, losses
    return result


def _reduced(values: Tensor, origin: ForwardPass | None, *, mean: bool) -> _Found | None:
    """Return the mean or sum of values that have a row, or several, for each row of a pass."""
    values = without_origin(values)
    if origin is None or not values.requires_grad or not values.ndim:
        return None
    if not values.numel():  # an empty lot, for which torch's mean is NaN
        return _Found(_noted(values.sum(), origin, values.flatten()))
    if not origin.rows or values.numel() % origin.rows:
        return None
    by_row = values.reshape(origin.rows, -1)
    losses = by_row.mean(1) if mean else by_row.sum(1)
    return _Found(_noted(losses.mean() if mean else losses.sum(), origin, losses))


def _loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found | None:
    """Compute a loss function of torch for each example, then reduce it.

    A mean with class weights, or with ignored labels other than the default, divides by what
    depends on all examples: there is no rule for it.
    """
    bound = _SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction, origin = given["reduction"], _origin(args, kwargs)
    if reduction not in ("mean", "sum") or origin is None:
        return None
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if (
        reduction == "mean"
        and "ignore_index" in given
        and (given["weight"] is not None or given["ignore_index"] != _NEVER_A_LABEL)
    ):
        return None
    given["reduction"] = "none"
    return _reduced(_plain(func, bound.args, bound.kwargs), origin, mean=reduction == "mean")


def _reduction(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Found | None:
    """Reduce values of each example to their mean or sum."""
    if len(args) != 1 or kwargs or not isinstance(args[0], ModelOutput):
        return None
    return _reduced(args[0], args[0].origin, mean=func in (torch.mean, Tensor.mean))


def _scaled(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Found | None:
    """Multiply or divide a loss by a number of Python, or negate it."""
    loss = next((value for value in args if _is_loss(value)), None)
    numbers = [value for value in args if isinstance(value, int | float)]
    if loss is None or kwargs or len(numbers) != len(args) - 1:
        return None
    if func in _DIVISIONS and args[0] is not loss:
        return None
    of_each = [loss.losses if value is loss else value for value in args]
    total = _plain(func, args, kwargs)
    return _Found(_noted(total, loss.origin, _plain(func, tuple(of_each), {})))


def _added(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Found | None:
    """Add losses of one forward pass; a number of Python adds no gradient."""
    losses = [value for value in args if _is_loss(value)]
    rest = [value for value in args if not isinstance(value, int | float) and not _is_loss(value)]
    if kwargs or rest or len({id(loss.origin) for loss in losses}) != 1:
        return None
    of_each = [loss.losses for loss in losses if loss.losses is not None]
    total = of_each[0] if len(of_each) == 1 else of_each[0] + of_each[1]
    return _Found(_noted(_plain(func, args, kwargs), losses[0].origin, total))


def _backward(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Found | None:
    """Run `engine.backward` of a loss whose parts are known."""
    loss = args[0]
    if not _is_loss(loss) or len(args) != 1 or any(bool(value) for value in kwargs.values()):
        return None
    loss.origin.backward(loss.losses)
    return _Found(None)


def _is_loss(value: object) -> bool:
    return isinstance(value, ModelOutput) and value.losses is not None


_NEVER_A_LABEL = -100  # torch's default of ignore_index
_LOSSES: tuple[Callable[..., Any], ...] = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.nll_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_SIGNATURES = {func: inspect.signature(func) for func in _LOSSES}
_DIVISIONS = (torch.div, Tensor.div)
_RULES: dict[Callable[..., Any], _Rule] = {
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys((torch.mean, Tensor.mean, torch.sum, Tensor.sum), _reduction),
    **dict.fromkeys((torch.mul, Tensor.mul, torch.neg, Tensor.neg, *_DIVISIONS), _scaled),
    **dict.fromkeys((torch.add, Tensor.add), _added),
    Tensor.backward: _backward,
}

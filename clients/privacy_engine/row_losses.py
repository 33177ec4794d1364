"""Separate loss of each example, although a torch loss function reduces a batch to one value.

Training scripts call `criterion(model(x), y).backward()`. The engine sees only the gradients of
that backward pass, which do not show whether the loss mixed examples. So the outputs of an attached
model are `ModelOutput` tensors. A torch loss function of such a tensor is computed for each example
and then reduced. The result keeps the loss of each row, and its `backward()` is
`engine.backward(losses)`.

For any other loss, `find_reduction` tests whether it is a mean or a sum over the examples.

Guarantee: the loss of a row depends on the outputs of that row and on the targets, as torch's
function defines it. The result of any other operation is a plain tensor without losses of rows,
because the caller's arithmetic may divide by something that depends on the whole batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from fedsim.clients.model_checks.isolation import Probe, ProbeBatch
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state


@dataclass(frozen=True)
class ForwardPass:
    """Description of a forward pass of an attached model; the output tensors refer to it.

    Attributes:
        rows: number of rows of the model's input and outputs.
        backward: function that gets one loss for each row and runs the backward pass through them.
    """

    rows: int
    backward: Callable[[Tensor], None]


class ModelOutput(Tensor):
    """Tensor computed from an attached model row by row, or a loss reduced from such a tensor.

    Attributes:
        origin: the forward pass; None after an in-place change, which may mix in other values.
        losses: for a reduced loss, the loss of each row (n,); otherwise None.
    """

    origin: ForwardPass | None = None
    losses: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, and keep the losses of the rows if it reduces them."""
        call = _Call(func, args, dict(kwargs or {}))
        result = _RULES[func](call) if func in _RULES else NotImplemented
        if result is not NotImplemented:
            return result
        result = call.plain()
        for value in [result] if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(value, ModelOutput):  # the function changed it in place
                value.origin = value.losses = None
        return result


def with_origin(outputs: Any, origin: ForwardPass) -> Any:
    """Return a model's outputs as `ModelOutput` tensors, which refer to their forward pass.

    Args:
        outputs: plain tensors in nested containers.
        origin: the forward pass from which they come.
    """
    if isinstance(outputs, Tensor):  # pytree takes longer than a small model
        return _noted(outputs, origin)
    return pytree.tree_map_only(Tensor, lambda value: _noted(value, origin), outputs)


def without_origin(value: Tensor) -> Tensor:
    """Return a model output as a plain `Tensor`, with the same values and autograd graph."""
    if not isinstance(value, ModelOutput):
        return value
    return _Call(Tensor.as_subclass, (value, Tensor), {}).plain()


@dataclass(frozen=True)
class _Call:
    """A call of a torch function with at least one `ModelOutput` among its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plain(self) -> Any:
        """Return the result as if every `ModelOutput` were a plain tensor."""
        return Tensor.__torch_function__(self.func, (), self.args, self.kwargs)

    @property
    def first(self) -> Any:
        """The first argument, whose rows the function does not mix."""
        return next(iter(self.args), self.kwargs.get("input"))

    @property
    def origin(self) -> ForwardPass | None:
        """The forward pass of the first argument."""
        return self.first.origin if isinstance(self.first, ModelOutput) else None


def _noted(result: Any, origin: ForwardPass, losses: Tensor | None = None) -> Any:
    """Return a tensor with its forward pass and losses attached, if it requires a gradient."""
    if type(result) is not Tensor or not result.requires_grad:
        return result
    noted = result.as_subclass(ModelOutput)
    noted.origin, noted.losses = origin, losses
    return noted


def _reduced(values: Tensor, origin: ForwardPass, *, mean: bool) -> Any:
    """Return the mean or sum of values that have the same number for each row of a pass."""
    if not values.requires_grad or not values.ndim:
        return NotImplemented
    if not values.numel():  # an empty batch, for which torch's mean is NaN
        return _noted(values.sum(), origin, values.flatten())
    if not origin.rows or values.numel() % origin.rows:
        return NotImplemented
    by_row = values.reshape(origin.rows, -1)
    losses = by_row.mean(1) if mean else by_row.sum(1)
    return _noted(losses.mean() if mean else losses.sum(), origin, losses)


def _loss(call: _Call) -> Any:
    """Compute a torch loss function for each example, then reduce the losses.

    Weights may be computed from the whole batch, and a mean with weights or with ignored labels
    divides by something that depends on all examples: these have no rule. A label of -100 gives a
    loss of 0 here, and does not change the divisor.
    """
    defaults = _DEFAULTS[call.func]
    given = defaults | dict(zip(defaults, call.args, strict=False)) | call.kwargs
    reduction, origin = given["reduction"], call.origin
    if origin is None or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if any(given.get(name) is not None for name in _UNKNOWN_IF_GIVEN):
        return NotImplemented
    if given.get("ignore_index", _NEVER_A_LABEL) != _NEVER_A_LABEL:
        return NotImplemented
    values = _Call(call.func, (), given | {"reduction": "none"}).plain()
    if reduction == "none":
        return _noted(values, origin)
    return _reduced(values, origin, mean=reduction == "mean")


def _reduction(call: _Call) -> Any:
    """Reduce losses of examples to their mean or sum."""
    origin = call.origin
    if origin is None or len(call.args) != 1 or call.kwargs or _is_loss(call.args[0]):
        return NotImplemented
    is_mean = call.func in (torch.mean, Tensor.mean)
    return _reduced(without_origin(call.args[0]), origin, mean=is_mean)


def _added(call: _Call) -> Any:
    """Add losses of one forward pass; a Python number may be added too, as it has no gradient."""
    losses = [value for value in call.args if _is_loss(value)]
    numbers = [value for value in call.args if isinstance(value, int | float)]
    passes = {id(loss.origin) for loss in losses}
    if call.kwargs or len(losses) + len(numbers) != len(call.args) or len(passes) != 1:
        return NotImplemented
    total = losses[0].losses
    for loss in losses[1:]:
        total = total + loss.losses
    return _noted(call.plain(), losses[0].origin, total)


def _by_row(call: _Call) -> Any:
    """Apply an operation that computes each row from the same row alone."""
    return NotImplemented if call.origin is None else _noted(call.plain(), call.origin)


def _along_dimension(call: _Call) -> Any:
    """Apply a softmax along a dimension other than that of the examples."""
    dimension = next(iter(call.args[1:]), call.kwargs.get("dim"))
    if call.origin is None or not isinstance(dimension, int):
        return NotImplemented
    return _by_row(call) if dimension % max(1, call.first.ndim) else NotImplemented


def _part(call: _Call) -> Any:
    """Take a part of each row, such as `outputs[:, 0]`."""
    place: Any = call.args[1]
    if not isinstance(place, tuple) or place[:1] != (slice(None),):
        return NotImplemented
    return (
        _by_row(call) if all(isinstance(index, int | slice) for index in place) else NotImplemented
    )


def _backward(call: _Call) -> Any:
    """Run `engine.backward` with the loss of each example."""
    (loss, *others) = call.args
    if not _is_loss(loss) or others or any(map(bool, call.kwargs.values())):
        return NotImplemented
    loss.origin.backward(loss.losses)
    return None


def _is_loss(value: object) -> bool:
    return isinstance(value, ModelOutput) and value.losses is not None


_NEVER_A_LABEL = -100  # torch's default of ignore_index
_UNKNOWN_IF_GIVEN = ("weight", "pos_weight", "size_average", "reduce")
_LOSSES: tuple[Callable[..., Any], ...] = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
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
_DEFAULTS = {
    func: {name: argument.default for name, argument in inspect.signature(func).parameters.items()}
    for func in _LOSSES
}
_ROW_OPERATIONS: tuple[Callable[..., Any], ...] = (
    *(torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.logsigmoid),
    *(torch.squeeze, Tensor.squeeze, torch.flatten, Tensor.flatten, torch.reshape),
    *(Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.float, Tensor.double),
)
_SOFTMAXES: tuple[Callable[..., Any], ...] = (
    *(torch.softmax, Tensor.softmax, functional.softmax),
    *(torch.log_softmax, Tensor.log_softmax, functional.log_softmax),
)
# A rule returns the result of a call, or NotImplemented where it does not apply.
_RULES: Mapping[Callable[..., Any], Callable[[_Call], Any]] = {
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys((torch.mean, Tensor.mean, torch.sum, Tensor.sum), _reduction),
    **dict.fromkeys((torch.add, Tensor.add), _added),
    **dict.fromkeys(_ROW_OPERATIONS, _by_row),
    **dict.fromkeys(_SOFTMAXES, _along_dimension),
    Tensor.__getitem__: _part,
    Tensor.backward: _backward,
}


Reduction = Literal["mean", "sum", "none"]

_MAX_EXAMPLES = 32  # number of different examples; each costs a backward pass


def find_reduction(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    features: Tensor,
    targets: Tensor,
    batch: int,
) -> Reduction:
    """Return how a loss reduces over the examples of a batch: "mean", "sum" or "none".

    The gradient of a batch of repeated examples is compared with the gradients of single examples.
    It is neither their mean nor their sum if the loss is a mean with class weights or ignored
    labels, or if the loss mixes examples in large batches.

    Args:
        model: the model as it will be trained.
        loss: function of outputs and targets (n, ...) that returns one value, or one value per
            example ("none").
        features: features of at least 2 public examples (n, ...); the first 32 are used.
        targets: targets of these examples (n, ...), with all kinds of labels that the loss treats
            differently.
        batch: batch size of the training.

    Guarantee:
        parameters, buffers, modes and global random generators are restored afterwards.

    Raises:
        UnsafeModelError: the loss is neither a mean nor a sum over the examples, or all gradients
            of the examples are 0.
    """
    most = min(len(features), _MAX_EXAMPLES)
    places = torch.arange(max(batch, most)) % most
    counts = torch.bincount(places).double()
    few = ProbeBatch(features[:most], targets[:most])
    whole = ProbeBatch(features[places.to(features.device)], targets[places.to(targets.device)])
    with preserve_state(model), torch.enable_grad():
        model.eval()  # dropout would draw different masks for a batch and for one example
        probe = Probe(model, loss)
        if probe.losses(whole).ndim:
            return "none"
        together = probe.gradients(whole)[0].double()
        alone = torch.stack([probe.gradients(few.only(i))[0].double() for i in range(most)])
    alone.nan_to_num_(0.0, 0.0, 0.0)  # an ignored label alone is 0/0: it has no gradient
    counts = counts.to(alone)
    size = float(counts @ alone.norm(dim=1))
    if not size > 0.0:
        raise UnsafeModelError(
            "the examples have no gradient, so it cannot be checked whether the loss is a mean or "
            "a sum over them; check with examples that the model does not fit already"
        )
    total = counts @ alone
    factors: dict[Reduction, int] = {"mean": len(places), "sum": 1}
    for reduction, factor in factors.items():
        if float((together * factor - total).norm()) <= probe.tolerance_other_shape * size:
            return reduction
    raise UnsafeModelError(
        f"the loss of {len(places)} examples is neither the mean nor the sum of the losses of each "
        "alone: it divides by something that depends on the other examples, such as their class "
        "weights or the number of labels that are not ignored, or mixes them. Return one value per "
        "example (reduction='none') and call engine.backward(losses)"
    )

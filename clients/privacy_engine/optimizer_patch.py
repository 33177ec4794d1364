"""Replacement of the methods `step` and `zero_grad` of an optimizer object."""

from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fedsim.clients.gradients.parameters import FlatParameters, modules_of


def patch_optimizer(
    optimizer: Optimizer,
    *,
    step: Callable[[Callable[[], Any]], None],
    virtual_step: Callable[[], None],
    zero_grad: Callable[[], None],
    owner: object,
) -> Callable[[], None]:
    """Give an optimizer the methods of a privacy engine; return a function that takes them back.

    The step is a bound method of the optimizer, as learning-rate schedulers expect. Copies and
    pickles of the optimizer are not patched, because torch stores only groups and state.

    Args:
        optimizer: the optimizer, patched in place.
        step: function that replaces `optimizer.step`; it gets the original method.
        virtual_step: function that becomes `optimizer.virtual_step`.
        zero_grad: function that is called after the original `optimizer.zero_grad`.
        owner: the engine, which becomes `optimizer.privacy_engine`.
    """
    own_step, own_zero_grad, attributes = optimizer.step, optimizer.zero_grad, vars(optimizer)
    is_active = True

    def private_step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not is_active:
            return own_step() if closure is None else own_step(closure)
        if closure is not None:
            raise ValueError(
                "step() takes no closure while a privacy engine is attached: gradients that a "
                "closure computes again would be clipped and released twice; call "
                "loss.backward() and then step()"
            )
        return step(own_step)

    def private_zero_grad(set_to_none: bool = True) -> None:
        own_zero_grad(set_to_none)
        if is_active:
            zero_grad()

    def undo() -> None:
        nonlocal is_active
        is_active = False
        attributes.pop("privacy_engine", None)
        for name, method in ours.items():
            restore_method(attributes, name, method, before[name])

    ours = {
        "step": MethodType(private_step, optimizer),
        "zero_grad": private_zero_grad,
        "virtual_step": virtual_step,
    }
    before = {name: attributes.get(name) for name in ours}
    attributes.update(ours, privacy_engine=owner)
    return undo


def restore_method(attributes: dict[str, Any], name: str, ours: Any, before: Any) -> None:
    """Restore a method of an object, unless other code has wrapped ours, which it still calls.

    Args:
        attributes: the object's `__dict__`.
        name: name of the method.
        ours: the method that replaced it.
        before: the attribute that it replaced; None for a method of the class.
    """
    if attributes.get(name) is not ours:
        return
    if before is None:
        del attributes[name]
    else:
        attributes[name] = before


def check_optimizer(optimizer: Optimizer, model: nn.Module, parameters: FlatParameters) -> None:
    """Check that an optimizer has exactly the parameters that are trained privately.

    Args:
        optimizer: the optimizer.
        model: the model.
        parameters: the parameters that the engine trains.

    Raises:
        ValueError: the parameters differ, and the message names them; or the optimizer evaluates
            the loss itself, as LBFGS does.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times in a step, each of which would have to be "
            "noised and charged; use SGD, Adam or another optimizer that steps once"
        )
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = chain.from_iterable(vars(m)["_parameters"].values() for m in modules_of(model))
    trained = {id(p) for p in own if p is not None and p.requires_grad}
    if not held.keys() == parameters.index.keys() == trained:
        raise ValueError(_difference(held, model, parameters))


def _difference(held: dict[int, Tensor], model: nn.Module, parameters: FlatParameters) -> str:
    """Return the text of the error for an optimizer that holds other tensors, given by `id`."""
    ours = parameters.index.keys()
    names = {id(p): name for name, p in model.named_parameters()}
    names |= {key: parameters.names[index] for key, index in parameters.index.items()}
    missing = [names[key] for key in ours if key not in held]
    extra = [
        names.get(key, f"one of shape {tuple(p.shape)} that the model does not have")
        for key, p in held.items()
        if key not in ours
    ]
    changed = [name for name, p in model.named_parameters() if p.requires_grad != (id(p) in ours)]
    parts = []
    if missing:
        parts.append(f"it lacks {_shorten(missing)}")
    if extra:
        parts.append(f"it has {_shorten(extra)} besides")
    if changed and not missing and not extra:
        parts.append(f"requires_grad of {_shorten(changed)} changed since the engine was made")
    return (
        "the optimizer must hold exactly the trainable parameters that the model had when the "
        f"engine was made: {'; '.join(parts) or 'the model has other parameters now'}. Freeze "
        "what is not trained first, then make the engine, then the optimizer from "
        "[p for p in model.parameters() if p.requires_grad]"
    )


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

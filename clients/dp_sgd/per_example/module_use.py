"""Layers that book-keeping has no rule for, run as one unit by vmap over the layer alone.

A unit gets a copy of its parameters for each example (expanded, not stored), so the gradients with
respect to these copies are those of the examples. One forward and one backward give them together
with those of the rest of the model, which stays on book-keeping; random layers inside draw once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.layers import HeldUse
from fedsim.core.errors import FedsimError

Layout = tuple[int | None, ...]
"""For each tensor among arguments or outputs, which dimension is the examples'; None: none is."""


class UnitError(FedsimError, RuntimeError):
    """A layer that cannot be run as one unit."""


@dataclass(frozen=True)
class Unit:
    """A layer to be run as one unit.

    Attributes:
        name: in the model.
        module: the layer.
        inputs: layout of the tensors among its arguments.
        outputs: layout of the tensors among its outputs.
    """

    name: str
    module: nn.Module
    inputs: Layout
    outputs: tuple[int, ...]


class ModuleUse(HeldUse):
    """One use of a unit: gradients with respect to each example's copy of the parameters.

    Args:
        copies: by parameter index, (n, *shape).
    """

    def __init__(self, copies: dict[int, Tensor]) -> None:
        super().__init__(list(copies))
        self._copies = copies

    @property
    def leaves(self) -> list[Tensor]:
        """The copies that gradients are wanted of."""
        return list(self._copies.values())

    @property
    def examples(self) -> int:
        """Number of examples n."""
        return len(next(iter(self._copies.values())))

    def filled(self, gradients: Iterator[Tensor | None]) -> "ModuleUse":
        """Take the gradients of `leaves` from an iterator and return the use."""
        found = {index: next(gradients) for index in self._copies}
        self._held = {index: value for index, value in found.items() if value is not None}
        self.parameters = list(self._held)
        return self

    def compute(self, index: int) -> Tensor:
        """Return the gradients (n, *shape) of a parameter that the output does not depend on."""
        return torch.zeros_like(self._copies[index])


@contextmanager
def units_in_place(
    units: Sequence[Unit], examples: int, parameters: FlatParameters
) -> Iterator[list[ModuleUse]]:
    """Run the given layers as units within the context, and yield the list of their uses."""
    uses: list[ModuleUse] = []
    before = [(unit.module, unit.module.__dict__.get("forward")) for unit in units]
    try:
        for unit in units:
            unit.module.forward = _forward(unit, examples, parameters, uses)
        yield uses
    finally:
        for module, own in before:
            _restore(module, own)


def _restore(module: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = own


def _forward(
    unit: Unit, examples: int, parameters: FlatParameters, uses: list[ModuleUse]
) -> Callable[..., Any]:
    """Return a stand-in for the layer's `forward`."""
    module, own = unit.module, unit.module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        stand_in = module.__dict__["forward"]
        _restore(module, own)
        try:
            return _run(unit, examples, parameters, uses, args, kwargs)
        finally:
            module.forward = stand_in

    return forward


def _run(
    unit: Unit,
    examples: int,
    parameters: FlatParameters,
    uses: list[ModuleUse],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    values, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    given = [values[i] for i in places]
    _check(unit, unit.inputs, given, examples)
    trained = {
        name: parameter
        for name, parameter in unit.module.named_parameters()
        if id(parameter) in parameters.index
    }
    copies = {
        name: p.detach().expand(examples, *p.shape).requires_grad_() for name, p in trained.items()
    }
    outside: dict[str, Any] = {}

    def one_example(own: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
        filled = list(values)
        for place, row, at in zip(places, rows, unit.inputs, strict=True):
            filled[place] = row if at is None else row.unsqueeze(at)
        args, kwargs = pytree.tree_unflatten(filled, structure)
        output = functional_call(unit.module, own, args, kwargs)
        outside["values"], outside["structure"] = pytree.tree_flatten(output)
        tensors = [value for value in outside["values"] if isinstance(value, Tensor)]
        if len(tensors) != len(unit.outputs):
            raise UnitError(f"layer {unit.name!r} returned other tensors than when it was tried")
        return tuple(value.squeeze(at) for value, at in zip(tensors, unit.outputs, strict=True))

    found = vmap(
        one_example, in_dims=(0, *unit.inputs), out_dims=unit.outputs, randomness="different"
    )(copies, *given)
    if trained:
        uses.append(ModuleUse({parameters.index[id(p)]: copies[n] for n, p in trained.items()}))
    tensors = iter(found)
    whole = [next(tensors) if isinstance(v, Tensor) else v for v in outside["values"]]
    return pytree.tree_unflatten(whole, outside["structure"])


def _check(unit: Unit, layout: Layout, given: list[Tensor], examples: int) -> None:
    fits = len(given) == len(layout) and all(
        at is None or (value.ndim > at and value.shape[at] == examples)
        for value, at in zip(given, layout, strict=True)
    )
    if not fits:
        raise UnitError(
            f"layer {unit.name!r} was called with tensors of other shapes than when it was tried: "
            f"{', '.join(str(tuple(value.shape)) for value in given)} for {examples} examples"
        )

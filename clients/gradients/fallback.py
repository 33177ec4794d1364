"""Gradients without a rule: row by row through `torch.func`, or one example at a time.

A unit is a module as a function of its parameters and of one example. `vmap` runs it on all rows
of a tile, each with its client's parameters. One backward pass gives the gradients of all rows.

One example at a time by plain autograd is the reference, for any model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PerExampleGradients, Tile, UncoveredParameterError


class Pass(Protocol):
    """What a unit needs of the pass that it is part of."""

    parameters: FlatParameters
    rows: int

    @property
    def anchor(self) -> Tensor:
        """A leaf that every recorded output depends on."""
        ...

    @property
    def clients(self) -> int:
        """Number of clients K."""
        ...

    def values_of(self, index: int) -> Tensor:
        """Return a parameter of all clients (K, *shape)."""
        ...

    def note(self, use: ExampleUse) -> None:
        """Note a use that a backward pass has filled in."""
        ...


Layout = dict[Any, bool]
"""Whether an argument of a unit has rows, by the structure of the call and the argument's place."""


def run_unit(module: nn.Module, layout: Layout, recording: Pass, *args: Any, **kwargs: Any) -> Any:
    """Run a module on a tile and record it.

    Each row gets its own part of tensors with one row per example, and all other values whole.
    Which are which is found out once: a mask may be as long as a later tile.

    Args:
        module: the unit.
        layout: of the unit's calls so far; filled in.
        recording: of the pass.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        UncoveredParameterError: no argument has a row for each example, or one has no longer.
    """
    index = recording.parameters.index
    trained = {name: index[id(p)] for name, p in module.named_parameters() if id(p) in index}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
        and layout.setdefault((structure, i), _has_rows(leaf, recording.rows))
    ]
    if not places or not all(_has_rows(leaves[i], recording.rows) for i in places):
        raise UncoveredParameterError(
            f"a {type(module).__name__} layer gets no input with one row per example",
            tuple(trained.values()),
        )
    call = _RowCall(module, list(trained), leaves, structure, places)
    use = ExampleUse(dict.fromkeys(trained.values(), recording.anchor))  # filled in later
    each = [recording.values_of(i) for i in trained.values()]
    rows = [leaves[i] for i in places]
    found: Any = _RunUnit.apply(recording.anchor, call, use, recording, each, *rows)
    return call.output(found)


class _RowCall:
    """A module's call on one example: a function of its parameters and of its rows."""

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        leaves: list[Any],
        structure: pytree.TreeSpec,
        places: list[int],
    ) -> None:
        self._module, self._names = module, names
        self._leaves, self._structure, self._places = leaves, structure, places
        self._output: tuple[list[Any], pytree.TreeSpec] | None = None

    def __call__(self, own: tuple[Tensor, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._leaves)
        for place, row in zip(self._places, rows, strict=True):
            leaves[place] = row.unsqueeze(0)
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        values = dict(zip(self._names, own, strict=True))
        stand_in = vars(self._module).pop("forward", None)
        try:
            output = functional_call(self._module, values, args, kwargs)
        finally:
            if stand_in is not None:
                vars(self._module)["forward"] = stand_in
        found, structure = pytree.tree_flatten(output)
        self._output = [_TENSOR if isinstance(v, Tensor) else v for v in found], structure
        return tuple(value.squeeze(0) for value in found if isinstance(value, Tensor))

    def output(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the module's output with the given tensors (n, ...) in it."""
        if self._output is None:
            raise RuntimeError("the unit has not run yet")
        leaves, structure = self._output
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in leaves], structure
        )


class _RunUnit(torch.autograd.Function):
    """Runs a unit on all rows, and records it in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        call: _RowCall,
        use: ExampleUse,
        recording: Pass,
        values: Sequence[Tensor],
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        clients = recording.clients
        each = recording.rows // clients
        copies = tuple(v.unsqueeze(1).expand(-1, each, *v.shape[1:]) for v in values)
        stacked = [row.unflatten(0, (clients, each)) for row in rows]
        smooth = [i for i, row in enumerate(rows) if row.is_floating_point()]
        over_rows = vmap(vmap(call, randomness="different"), randomness="different")

        def run(own: tuple[Tensor, ...], *given: Tensor) -> tuple[Tensor, ...]:
            filled = list(stacked)
            for place, value in zip(smooth, given, strict=True):
                filled[place] = value
            return over_rows(own, *filled)

        found: Any = vjp(run, copies, *(stacked[i] for i in smooth))
        outputs, ctx.gradients_of = found
        ctx.use, ctx.recording, ctx.smooth, ctx.each = use, recording, smooth, each
        ctx.set_materialize_grads(True)
        return tuple(value.flatten(0, 1) for value in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stacked = tuple(g.unflatten(0, (-1, ctx.each)) for g in gradients)
        own, *given = ctx.gradients_of(stacked)
        use: ExampleUse = ctx.use
        held = (value.flatten(0, 1) for value in own)
        use.held = dict(zip(use.parameters, held, strict=True))
        ctx.recording.note(use)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, value in zip(ctx.smooth, given, strict=True):
            found[5 + place] = value.flatten(0, 1)
        return tuple(found)


_TENSOR = object()  # stands for a tensor in a unit's output


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == rows


class OneAtATime(PerExampleGradients):
    """Each example is alone in its batch, so no gradient can depend on another example."""

    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, ExampleUse]:
        """Return the gradients of a tile's rows, of one client whose values the model holds."""
        found = list[Sequence[Tensor]]()
        pairs = zip(tile.features.split(1), tile.targets.split(1), strict=True)
        for row, (x, y) in enumerate(pairs):
            if tile.randomness is not None:
                tile.randomness.only(row)
            with tile.keyed:
                found.append(self._of_example(x, y))
        held = {i: torch.stack(parts) for i, parts in enumerate(zip(*found, strict=True))}
        return dict.fromkeys(held, ExampleUse(held))

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)

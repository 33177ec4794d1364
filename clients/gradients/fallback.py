"""Per-example gradients without layer rules: by `torch.func`, or one example at a time.

`torch.func` turns a module into a function of its parameters and of one example. `vmap` runs this
function on all rows of a padded batch, each row with the parameter values of its client. One
backward pass gives the gradients of all rows.

`OneAtATime` computes gradients by plain autograd and is the reference for any model.
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
from fedsim.clients.gradients.per_example import (
    PaddedBatch,
    PerExampleGradients,
    UncoveredParameterError,
)


class Pass(Protocol):
    """Protocol of a record of per-example gradients, for modules that run through `torch.func`."""

    parameters: FlatParameters
    rows: int

    @property
    def anchor(self) -> Tensor:
        """Dummy leaf tensor on which all recorded outputs depend, so autograd visits each call."""
        ...

    @property
    def clients(self) -> int:
        """Number of clients K in the padded batch."""
        ...

    def values_of(self, index: int) -> Tensor:
        """Return the values (K, *shape) of the parameter with the given index, for K clients."""
        ...

    def note(self, use: ExampleUse) -> None:
        """Store the per-example gradients that the backward pass found for one module call."""
        ...


Layout = dict[Any, bool]
"""Whether an argument of a unit has one row per example, by call structure and argument index."""


def run_unit(module: nn.Module, layout: Layout, recording: Pass, *args: Any, **kwargs: Any) -> Any:
    """Run a module on each row of a padded batch through `torch.func`, and return its output.

    Tensors with one row per example are split into their rows. All other arguments are passed whole
    to each row. The module's first call decides which arguments are split. Later calls split
    the same arguments, as a mask may by chance have as many rows as a later batch.

    Args:
        module: the module to run.
        layout: for each argument, whether it is split. The first call of the module fills this in.
        recording: record to which the backward pass adds the per-example gradients.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        UncoveredParameterError: no argument has one row per example, or an argument that had one
            row per example in an earlier call no longer has.
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
    values = [recording.values_of(i) for i in trained.values()]
    rows = [leaves[i] for i in places]
    outputs: Any = _RunUnit.apply(recording.anchor, call, use, recording, values, *rows)
    return call.output(outputs)


class _RowCall:
    """The call of a module on one example, as a function of its parameters and its input rows."""

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

    def __call__(self, parameters: tuple[Tensor, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._leaves)
        for place, row in zip(self._places, rows, strict=True):
            leaves[place] = row.unsqueeze(0)
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        values = dict(zip(self._names, parameters, strict=True))
        stand_in = vars(self._module).pop("forward", None)
        try:
            output = functional_call(self._module, values, args, kwargs)
        finally:
            if stand_in is not None:
                vars(self._module)["forward"] = stand_in
        results, structure = pytree.tree_flatten(output)
        self._output = [_TENSOR if isinstance(v, Tensor) else v for v in results], structure
        return tuple(value.squeeze(0) for value in results if isinstance(value, Tensor))

    def output(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the module's output structure, filled with the given tensors (n, ...)."""
        if self._output is None:
            raise RuntimeError("the unit has not run yet")
        leaves, structure = self._output
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in leaves], structure
        )


class _RunUnit(torch.autograd.Function):
    """Runs a unit on all rows, and records its gradients in the backward pass."""

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
        size = recording.rows // clients
        copies = tuple(v.unsqueeze(1).expand(-1, size, *v.shape[1:]) for v in values)
        stacked = [row.unflatten(0, (clients, size)) for row in rows]
        smooth = [i for i, row in enumerate(rows) if row.is_floating_point()]
        over_rows = vmap(vmap(call, randomness="different"), randomness="different")

        def run(parameters: tuple[Tensor, ...], *given: Tensor) -> tuple[Tensor, ...]:
            filled = list(stacked)
            for place, value in zip(smooth, given, strict=True):
                filled[place] = value
            return over_rows(parameters, *filled)

        result: Any = vjp(run, copies, *(stacked[i] for i in smooth))
        outputs, ctx.gradients_of = result
        ctx.use, ctx.recording, ctx.smooth, ctx.rows_each = use, recording, smooth, size
        ctx.set_materialize_grads(True)
        return tuple(value.flatten(0, 1) for value in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stacked = tuple(g.unflatten(0, (-1, ctx.rows_each)) for g in gradients)
        parameter_gradients, *given = ctx.gradients_of(stacked)
        use: ExampleUse = ctx.use
        held = (value.flatten(0, 1) for value in parameter_gradients)
        use.held = dict(zip(use.parameters, held, strict=True))
        ctx.recording.note(use)
        input_gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, value in zip(ctx.smooth, given, strict=True):
            input_gradients[5 + place] = value.flatten(0, 1)
        return tuple(input_gradients)


_TENSOR = object()  # stands for a tensor in a unit's output


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == rows


class OneAtATime(PerExampleGradients):
    """Gradient method that computes per-example gradients in a loop, one example at a time."""

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from parameter index to the gradients of all rows of a padded batch.

        Args:
            values: not used, as the model holds the client's parameters.
            padded: padded batch of one client.
        """
        gradients = list[Sequence[Tensor]]()
        pairs = zip(padded.features.split(1), padded.targets.split(1), strict=True)
        for row, (x, y) in enumerate(pairs):
            if padded.randomness is not None:
                padded.randomness.only(row)
            with padded.keyed:
                gradients.append(self._of_example(x, y))
        held = {i: torch.stack(parts) for i, parts in enumerate(zip(*gradients, strict=True))}
        return dict.fromkeys(held, ExampleUse(held))

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)

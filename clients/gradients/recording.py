"""Records of the layer calls in a forward and backward pass, with their per-example gradients.

During a pass, a layer rule replaces `forward` of each module with trained parameters; afterwards
the model is unchanged. A "use" is one call of a layer, which uses its trained parameters. The
backward pass adds the per-example gradients to each use. A layer may be called several times, and
forward passes may interleave, as each call is a separate use.

A module without a rule is a unit: `torch.func` turns it into a function of its parameters and of
one example. `vmap` runs this function on all rows of a padded batch, each row with the parameter
values of its client. One backward pass gives the gradients of all rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from fedsim.clients.gradients.layers import RULES
from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse, Operand
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import UncoveredParameterError


class Recording:
    """Record of the layer calls ("uses" of trained parameters) in one pass over a padded batch.

    Guarantee: a backward pass that starts after the forward pass records, exactly once, each layer
    call through which it passes. A forward pass alone records nothing.

    Args:
        parameters: flat layout of the model's trained parameters.
        values: values of each parameter for K clients (K, *shape), by parameter index.
        weights: weight of each row of the padded batch (n,), 0 for padding.

    Attributes:
        rows: number of rows n of the padded batch.
        uses: the recorded layer calls with their gradients, appended by backward passes.
        clients: number of clients K in the padded batch.
        dtype: type of the parameters.
    """

    def __init__(
        self, parameters: FlatParameters, values: Sequence[Tensor], weights: Tensor
    ) -> None:
        self.weights, self.rows, self.uses = weights, weights.shape[0], list[ExampleUse]()
        self.is_running = False
        self.parameters = parameters
        self.values, self.clients, self.dtype = values, values[0].shape[0], values[0].dtype

    @property
    def anchor(self) -> Tensor:
        """Dummy leaf tensor on which all recorded outputs depend, so autograd visits each layer."""
        return self.parameters.anchor

    def operand(self, parameter: Tensor) -> Operand:
        """Return the values (K, *shape) of a trained or frozen parameter for all K clients."""
        index = self.parameters.index.get(id(parameter))
        if index is None:
            frozen = parameter.detach()
            return Operand(frozen.expand(self.clients, *frozen.shape), None)
        return Operand(self.values[index], index)

    def record(self, use: LayerUse, x: Tensor) -> Tensor:
        """Return the output of a layer call, and have the backward pass record the call.

        Under autocast the output has the type that autocast chooses. The gradients at the input and
        at the output are converted to the type of the parameters for norms and sums.

        Args:
            use: the layer call, with the layer's parameters.
            x: input of the layer (n, ...), one row per example.

        Raises:
            UncoveredParameterError: the input does not have one row for each row of the padded
                batch.
        """
        self.check_rows(use, x)
        if x.is_floating_point() and x.dtype != self.dtype:
            x = x.to(self.dtype)
        output: Any = _Recorded.apply(self.anchor, x, use, self)
        return output

    def check_rows(self, use: LayerUse, x: Tensor) -> None:
        """Check that a layer's input x (n, ...) has one row for each row of the padded batch.

        Raises:
            UncoveredParameterError: the input has another number of rows.
        """
        if x.ndim == 0 or x.shape[0] != self.rows:
            raise UncoveredParameterError(
                f"a layer gets an input of shape {tuple(x.shape)} for {self.rows} examples, where "
                "the first dimension should be the examples",
                tuple(use.parameters),
            )

    def note(self, use: ExampleUse) -> None:
        """Store a layer call after a backward pass has filled in its gradients.

        Calls from backward passes inside the model's forward are ignored, as these passes do not
        compute the gradient of the loss.
        """
        if not self.is_running:
            use.row_weights = self.weights
            self.uses.append(use)


class _Recorded(torch.autograd.Function):
    """Runs a use in the forward pass, and records it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, use: LayerUse, recording: Recording) -> Tensor:
        ctx.use, ctx.recording, ctx.saved = use, recording, use.needs_input
        if use.needs_input:
            ctx.save_for_backward(x)
        return use.forward(x).data  # no view, so that the next layer may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        use: LayerUse = ctx.use
        if g.dtype != ctx.recording.dtype:
            g = g.to(ctx.recording.dtype)
        if ctx.saved:
            # Detached: the autograd history holds the use, and no collector would see that cycle.
            use.input = ctx.saved_tensors[0].detach()
        use.output_gradient = g
        ctx.recording.note(use)
        return None, use.input_gradient(g) if ctx.needs_input_grad[1] else None, None, None


Layout = dict[Any, bool]
"""Whether an argument of a unit has one row per example, by call structure and argument index."""


def run_unit(
    module: nn.Module, layout: Layout, recording: Recording, *args: Any, **kwargs: Any
) -> Any:
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
    values = [recording.values[i] for i in trained.values()]
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
        recording: Recording,
        values: Sequence[Tensor],
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        clients, size = recording.clients, recording.rows // recording.clients
        # Nested, torch cannot draw the dropout of attention: one client's rows have one level.
        shape = (clients, size) if clients > 1 else (size,)
        copies = tuple(
            v.unsqueeze(1).expand(-1, size, *v.shape[1:]).reshape(*shape, *v.shape[1:])
            for v in values
        )
        stacked = [row.unflatten(0, shape) for row in rows]
        smooth = [i for i, row in enumerate(rows) if row.is_floating_point()]
        over_rows: Callable[..., Any] = call
        for _ in shape:
            over_rows = vmap(over_rows, randomness="different")

        def run(parameters: tuple[Tensor, ...], *given: Tensor) -> tuple[Tensor, ...]:
            filled = list(stacked)
            for place, value in zip(smooth, given, strict=True):
                filled[place] = value
            return over_rows(parameters, *filled)

        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it has no gradient in torch.func
        try:
            result: Any = vjp(run, copies, *(stacked[i] for i in smooth))
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        outputs, ctx.gradients_of = result
        ctx.use, ctx.recording, ctx.smooth, ctx.shape = use, recording, smooth, shape
        ctx.set_materialize_grads(True)
        return tuple(value.flatten(0, len(shape) - 1) for value in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stacked = tuple(g.unflatten(0, ctx.shape) for g in gradients)
        parameter_gradients, *given = ctx.gradients_of(stacked)
        use: ExampleUse = ctx.use
        last = len(ctx.shape) - 1
        held = (value.flatten(0, last) for value in parameter_gradients)
        use.held = dict(zip(use.parameters, held, strict=True))
        ctx.recording.note(use)
        input_gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, value in zip(ctx.smooth, given, strict=True):
            input_gradients[5 + place] = value.flatten(0, last)
        return tuple(input_gradients)


_TENSOR = object()  # stands for a tensor in a unit's output


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == rows


class RuledModel:
    """Model whose layers run by layer rules, which compute and record per-example gradients.

    Modules that are listed in `units` run through `torch.func` instead.

    Args:
        model: the model.
        parameters: flat layout of its trained parameters.
        units: names of modules to run through `torch.func`; "" is the whole model.

    Attributes:
        uncovered: indices of the trained parameters that no rule and no module of `units` covers.
    """

    def __init__(
        self, model: nn.Module, parameters: FlatParameters, units: Sequence[str] = ()
    ) -> None:
        self.model, self.units = model, tuple(units)
        self.parameters = parameters
        self._stacked: tuple[Tensor, list[Tensor]] | None = None
        self._calls: list[tuple[nn.Module, Callable[..., Any]]] = []
        covered: set[int] = set()
        for name, module in model.named_modules():
            if any(name == unit or name.startswith(f"{unit}." if unit else "") for unit in units):
                covered.update(map(id, module.parameters()))
                if name in units:
                    self._calls.append((module, partial(run_unit, module, {})))
                continue
            trained = [id(p) for p in module.parameters(recurse=False) if id(p) in parameters.index]
            rule = None if "forward" in vars(module) else RULES.get(type(module))
            if trained and rule is not None:
                covered.update(trained)
                self._calls.append((module, partial(_run_rule, rule, module)))
        self.uncovered = tuple(i for key, i in parameters.index.items() if key not in covered)

    @cached_property
    def covers_root(self) -> bool:
        """Whether the model's root module itself runs by a layer rule or through `torch.func`."""
        return any(module is self.model for module, _ in self._calls)

    @cached_property
    def unit_modules(self) -> frozenset[nn.Module]:
        """Set of the modules that run through `torch.func`."""
        return frozenset(self.model.get_submodule(name) for name in self.units)

    def start(self, values: Tensor, weights: Tensor) -> Recording:
        """Return an empty `Recording` for a new pass over a padded batch.

        Args:
            values: flat parameters of each of K clients (K, size).
            weights: weight of each row of the padded batch (n,), 0 for padding.
        """
        if self._stacked is None or self._stacked[0] is not values:
            self._stacked = values, self.parameters.stacked_views(values)
        return Recording(self.parameters, self._stacked[1], weights)

    def fill(
        self, recording: Recording, outputs: Tensor, g: Tensor | None, others: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass, which adds layer calls and their gradients to a recording.

        Args:
            recording: the recording of the pass.
            outputs: outputs of the model, or a scalar loss.
            g: gradient at the outputs; None for a scalar loss.
            others: tensors other than parameters whose gradients are returned.

        Returns:
            The gradients of `others`; None for a tensor that the outputs do not depend on.

        Raises:
            UncoveredParameterError: the model used a parameter outside the recorded layer calls.
        """
        if not outputs.requires_grad:  # nothing trained was used
            return (None,) * len(others)
        tensors = self.parameters.tensors
        wanted = (recording.anchor, *tensors, *others)
        gradients = torch.autograd.grad(outputs, wanted, g, allow_unused=True)[1:]
        missed = tuple(i for i, _ in enumerate(tensors) if gradients[i] is not None)
        if missed:
            names = ", ".join(self.parameters.names[i] for i in missed)
            raise UncoveredParameterError(f"no rule for how {names} is used", missed)
        return gradients[len(tensors) :]

    @contextmanager
    def in_place(self, recording: Recording) -> Iterator[None]:
        """Return a context in which modules run by layer rules and record their calls."""
        before = [(module, vars(module).get("forward")) for module, _ in self._calls]
        recording.is_running = True
        try:
            for module, call in self._calls:
                vars(module)["forward"] = partial(call, recording)
            yield
        finally:
            recording.is_running = False
            for module, forward in before:
                if forward is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = forward


def _run_rule(
    rule: Callable[..., Any], module: nn.Module, recording: Recording, *args: Any, **kwargs: Any
) -> Any:
    output = rule(recording, module, *args, **kwargs)
    if output is None:
        index: Mapping[int, int] = recording.parameters.index
        trained = tuple(index[id(p)] for p in module.parameters(recurse=False) if id(p) in index)
        kind = type(module).__name__
        raise UncoveredParameterError(f"no rule covers this use of a {kind} layer", trained)
    return output

"""One pass of a model over a tile: its layers run their rules and record their uses.

The model itself is unchanged: during a pass, `forward` of each module with trained parameters is
replaced by its rule. A backward pass fills the uses in. Each call has a use of its own, so layers
may be reused and forward passes may interleave.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim.clients.gradients.fallback import run_unit
from fedsim.clients.gradients.layers import RULES
from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse, Operand
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import UncoveredParameterError


class Recording:
    """The uses of parameters in one pass.

    Guarantee: a use is recorded when a backward pass that starts after the forward pass goes
    through it, once for each such pass: forwards without a backward leave nothing.

    Args:
        parameters: of the model.
        values: each client's parameters (K, *shape), by index.
        rows: n, the rows of the tile.

    Attributes:
        uses: filled by backward passes.
        dtype: of the parameters.
    """

    def __init__(self, parameters: FlatParameters, values: Sequence[Tensor], rows: int) -> None:
        self.rows, self.uses = rows, list[ExampleUse]()
        self.is_running = False
        self.parameters = parameters
        self._values = values
        self.dtype = values[0].dtype

    @cached_property
    def anchor(self) -> Tensor:
        """A leaf that every recorded output depends on: a backward pass to it fills the uses."""
        return torch.zeros((), requires_grad=True)

    @property
    def clients(self) -> int:
        """Number of clients K."""
        return self._values[0].shape[0]

    def operand(self, parameter: Tensor) -> Operand:
        """Return a parameter for all clients of the tile."""
        index = self.parameters.index.get(id(parameter))
        if index is None:
            frozen = parameter.detach()
            return Operand(frozen.expand(self.clients, *frozen.shape), None)
        return Operand(self._values[index], index)

    def values_of(self, index: int) -> Tensor:
        """Return a parameter of all clients (K, *shape)."""
        return self._values[index]

    def record(self, use: LayerUse, x: Tensor) -> Tensor:
        """Run a use on its input (n, ...), one row per example, and record it.

        Under autocast the output has the type that autocast chooses. Norms and sums have that of
        the parameters, to which input and output gradient are converted.

        Raises:
            UncoveredParameterError: the input has another number of rows.
        """
        self.check_rows(use, x)
        if x.is_floating_point() and x.dtype != self.dtype:
            x = x.to(self.dtype)
        output: Any = _Recorded.apply(self.anchor, x, use, self)
        return output

    def check_rows(self, use: LayerUse, x: Tensor) -> None:
        """Check that an input (n, ...) has one row per example.

        Raises:
            UncoveredParameterError: it has another number of rows.
        """
        if x.ndim == 0 or x.shape[0] != self.rows:
            raise UncoveredParameterError(
                f"a layer gets an input of shape {tuple(x.shape)} for {self.rows} examples, where "
                "the first dimension should be the examples",
                tuple(use.parameters),
            )

    def note(self, use: ExampleUse) -> None:
        """Note a use that a backward pass has filled in.

        Backward passes of the model's own, inside its forward, are not those of the loss.
        """
        if not self.is_running:
            self.uses.append(use)


class _Recorded(torch.autograd.Function):
    """Runs a use, and notes it in the backward pass."""

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
            # Without its history, which holds the use: no collector sees that circle.
            use.input = ctx.saved_tensors[0].detach()
        use.output_gradient = g
        ctx.recording.note(use)
        return None, use.input_gradient(g) if ctx.needs_input_grad[1] else None, None, None


class RuledModel:
    """A model whose modules run by rules, and some as units.

    Args:
        model: the model.
        parameters: its trained parameters.
        units: names of modules to run through `torch.func`; "" is the whole model.
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
            own = [id(p) for p in module.parameters(recurse=False) if id(p) in parameters.index]
            rule = None if "forward" in vars(module) else RULES.get(type(module))
            if own and rule is not None:
                covered.update(own)
                self._calls.append((module, partial(_run_rule, rule, module)))
        self.uncovered = tuple(i for key, i in parameters.index.items() if key not in covered)

    @cached_property
    def covers_root(self) -> bool:
        """Whether the model itself runs by a rule, or as a unit."""
        return any(module is self.model for module, _ in self._calls)

    @cached_property
    def unit_modules(self) -> frozenset[nn.Module]:
        """The modules that run through `torch.func`."""
        return frozenset(self.model.get_submodule(name) for name in self.units)

    def start(self, values: Tensor, rows: int) -> Recording:
        """Return the recording of a pass.

        Args:
            values: each client's flat parameters (K, size).
            rows: n.
        """
        if self._stacked is None or self._stacked[0] is not values:
            self._stacked = values, self.parameters.stacked_views(values)
        return Recording(self.parameters, self._stacked[1], rows)

    def fill(
        self, recording: Recording, outputs: Tensor, g: Tensor | None, others: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """Fill the uses of a pass in, from the gradient at its outputs.

        Args:
            recording: of the pass.
            outputs: that a loss depends on.
            g: the gradient at them; None for a scalar loss.
            others: tensors whose gradients are wanted.

        Returns:
            The gradients of `others`, None where the outputs do not depend on one.

        Raises:
            UncoveredParameterError: a gradient reached a parameter by a way that no use has seen.
        """
        if not outputs.requires_grad:  # nothing trained was used
            return (None,) * len(others)
        tensors = self.parameters.tensors
        wanted = (recording.anchor, *tensors, *others)
        found = torch.autograd.grad(outputs, wanted, g, allow_unused=True)[1:]
        missed = tuple(i for i, _ in enumerate(tensors) if found[i] is not None)
        if missed:
            names = ", ".join(self.parameters.names[i] for i in missed)
            raise UncoveredParameterError(f"no rule for how {names} is used", missed)
        return found[len(tensors) :]

    @contextmanager
    def in_place(self, recording: Recording) -> Iterator[None]:
        """Run the modules by their rules within the context."""
        before = [(module, vars(module).get("forward")) for module, _ in self._calls]
        recording.is_running = True
        try:
            for module, call in self._calls:
                vars(module)["forward"] = partial(call, recording)
            yield
        finally:
            recording.is_running = False
            for module, own in before:
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = own


def _run_rule(
    rule: Callable[..., Any], module: nn.Module, recording: Recording, *args: Any, **kwargs: Any
) -> Any:
    output = rule(recording, module, *args, **kwargs)
    if output is None:
        index: Mapping[int, int] = recording.parameters.index
        own = tuple(index[id(p)] for p in module.parameters(recurse=False) if id(p) in index)
        kind = type(module).__name__
        raise UncoveredParameterError(f"no rule covers this use of a {kind} layer", own)
    return output

"""Records of the layer calls in a forward and backward pass, with their per-example gradients.

During a pass, a layer rule replaces `forward` of each module with trained parameters; afterwards
the model is unchanged. A "use" is one call of a layer, which uses its trained parameters. The
backward pass adds the per-example gradients to each use. A layer may be called several times, and
forward passes may interleave, as each call is a separate use.
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
    """Record of the layer calls ("uses" of trained parameters) in one pass over a padded batch.

    Guarantee: a backward pass that starts after the forward pass records, exactly once, each layer
    call through which it passes. A forward pass alone records nothing.

    Args:
        parameters: flat layout of the model's trained parameters.
        values: values of each parameter for K clients (K, *shape), by parameter index.
        rows: number of rows n of the padded batch.

    Attributes:
        uses: the recorded layer calls with their gradients, appended by backward passes.
        dtype: type of the parameters.
    """

    def __init__(self, parameters: FlatParameters, values: Sequence[Tensor], rows: int) -> None:
        self.rows, self.uses = rows, list[ExampleUse]()
        self.is_running = False
        self.parameters = parameters
        self._values = values
        self.dtype = values[0].dtype

    @cached_property
    def anchor(self) -> Tensor:
        """Dummy leaf tensor on which all recorded outputs depend, so autograd visits each layer."""
        return torch.zeros((), requires_grad=True)

    @property
    def clients(self) -> int:
        """Number of clients K in the padded batch."""
        return self._values[0].shape[0]

    def operand(self, parameter: Tensor) -> Operand:
        """Return the values (K, *shape) of a trained or frozen parameter for all K clients."""
        index = self.parameters.index.get(id(parameter))
        if index is None:
            frozen = parameter.detach()
            return Operand(frozen.expand(self.clients, *frozen.shape), None)
        return Operand(self._values[index], index)

    def values_of(self, index: int) -> Tensor:
        """Return the values (K, *shape) of the parameter with the given index, for K clients."""
        return self._values[index]

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

    def start(self, values: Tensor, rows: int) -> Recording:
        """Return an empty `Recording` for a new pass over a padded batch.

        Args:
            values: flat parameters of each of K clients (K, size).
            rows: number of rows n of the padded batch.
        """
        if self._stacked is None or self._stacked[0] is not values:
            self._stacked = values, self.parameters.stacked_views(values)
        return Recording(self.parameters, self._stacked[1], rows)

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

"""Per-example gradients by layer rules, for one client or several clients at once.

The losses of this module have a formula for the gradient with respect to the model's outputs. With
the formula, torch's backward pass through the loss is not needed. Sequential models of common
modules run backwards without autograd, which takes longer than the arithmetic of small models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim.clients.gradients.layers import RULES
from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.padded_batches import padded_parts
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import (
    PaddedBatch,
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
)
from fedsim.clients.gradients.recording import Recording, RuledModel

Backward = Callable[[Tensor], Tensor]
"""Function from the gradient at a module's output to the gradient at its input."""
_ATEN = torch.ops.aten


# The backward functions are torch's own, one operation each, where a formula takes three.


def _relu(x: Tensor) -> tuple[Tensor, Backward]:
    y = torch.relu(x)
    return y, lambda g: _ATEN.threshold_backward(g, y, 0)


def _tanh(x: Tensor) -> tuple[Tensor, Backward]:
    y = torch.tanh(x)
    return y, lambda g: _ATEN.tanh_backward(g, y)


def _sigmoid(x: Tensor) -> tuple[Tensor, Backward]:
    y = torch.sigmoid(x)
    return y, lambda g: _ATEN.sigmoid_backward(g, y)


def _flatten(x: Tensor) -> tuple[Tensor, Backward]:
    shape = x.shape
    return x.flatten(1), lambda g: g.view(shape)


_Line = Callable[[Recording, nn.Module, Tensor, bool], tuple[Tensor, Backward]]
_FUNCTIONS: Mapping[type[nn.Module], Callable[[Tensor], tuple[Tensor, Backward]]] = {
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.Identity: lambda x: (x, lambda g: g),
}
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)  # rules with a single use
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleSequence:
    """Runner of a sequential model and its backward pass without torch's autograd.

    Args:
        ruled: the model with its layer rules.
    """

    def __init__(self, ruled: RuledModel) -> None:
        self._ruled = ruled
        self._is_sequence = _is_sequence(ruled, ruled.model)
        self._modules = tuple(_modules_of(ruled, ruled.model)) if self._is_sequence else ()
        self._hooks = tuple(vars(m)[name] for m in ruled.model.modules() for name in _HOOKS)
        sequences = [m for m in ruled.model.modules() if type(m) is nn.Sequential]
        children = [vars(m)["_modules"] for m in sequences]
        self._children = [(modules, tuple(modules.values())) for modules in children]
        lines = [self._line_of(module) for module in self._modules]
        self._is_by_hand = None not in lines
        self._lines = [line or self._by_autograd for line in lines]
        index = ruled.parameters.index
        trained = [any(id(p) in index for p in m.parameters()) for m in self._modules]
        self._first = trained.index(True) if True in trained else len(trained)

    @property
    def is_usable(self) -> bool:
        """Whether the model is still a sequence of the same modules and has no hooks."""
        if not self._is_sequence or any(self._hooks):
            return False
        return all(tuple(children.values()) == before for children, before in self._children)

    def run(self, recording: Recording, x: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the model's outputs on a padded batch, and a function that runs the backward pass.

        The function takes the gradient at the outputs, and adds layer calls with their gradients to
        the recording.

        Args:
            recording: the recording of the pass.
            x: features of the rows (n, ...).
        """
        steps = []
        with nullcontext() if self._is_by_hand else self._ruled.in_place(recording):
            for place, (module, line) in enumerate(zip(self._modules, self._lines, strict=True)):
                x, back = line(recording, module, x, place == self._first)
                steps.append(back)
        return x, lambda g: self._backward(steps, g)

    def _line_of(self, module: nn.Module) -> _Line | None:
        """Return the function that runs a module without autograd; None if there is none."""
        kind = type(module)
        if kind in _LAYERS and module not in self._ruled.unit_modules:
            return self._layer
        if kind in _FUNCTIONS or _flattens(module):
            function = _FUNCTIONS.get(kind, _flatten)
            return lambda recording, module, x, is_first: function(x)
        return None

    def record(self, padded_batches: Sequence[Recording], x: Tensor) -> Tensor:
        """Return the outputs (n, ...) as a tensor on which torch can run the backward pass.

        The backward pass adds the layer calls with their gradients to the recordings.

        Args:
            padded_batches: a recording for each padded batch. The padded batches have equal numbers
                of rows, and split the n rows of x in order; padding fills the last one.
            x: features of the rows (n, ...), without a gradient.
        """
        outputs: Any = _RunSequence.apply(padded_batches[0].anchor, x, self, padded_batches)
        return outputs

    def _backward(self, steps: Sequence[Backward], g: Tensor) -> None:
        for place in range(len(steps) - 1, self._first - 1, -1):
            g = steps[place](g)

    def _layer(
        self, recording: Recording, module: nn.Module, x: Tensor, is_first: bool
    ) -> tuple[Tensor, Backward]:
        direct = _Direct(recording)
        y = RULES[type(module)](direct, module, x)
        if y is None or direct.use is None:
            raise UncoveredParameterError(f"no rule covers this {type(module).__name__} layer")
        use = direct.use

        def back(g: Tensor) -> Tensor:
            use.input, use.output_gradient = x, g
            if use.parameters:
                recording.note(use)
            return g if is_first else use.input_gradient(g)

        return y, back

    def _by_autograd(
        self, recording: Recording, module: nn.Module, x: Tensor, is_first: bool
    ) -> tuple[Tensor, Backward]:
        leaf = x.detach()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        with torch.enable_grad():
            # A copy, since the layer before holds this tensor for its backward function.
            y = module(leaf.clone() if getattr(module, "inplace", False) else leaf)

        def back(g: Tensor) -> Tensor:
            grads = self._ruled.fill(recording, y, g, (leaf,) if leaf.requires_grad else ())
            return grads[0] if grads and grads[0] is not None else torch.zeros_like(leaf)

        return y.detach(), back


class _Direct:
    """Records the single use of a layer's parameters without autograd."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.operand = recording.operand
        self.use: LayerUse | None = None

    def record(self, use: LayerUse, x: Tensor) -> Tensor:
        """Return the output of a use on its input (n, ...), and keep the use."""
        self._recording.check_rows(use, x)
        self.use = use
        return use.forward(x)


class _RunSequence(torch.autograd.Function):
    """Runs a sequential model in padded batches, as one node of torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        sequence: ModuleSequence,
        padded_batches: Sequence[Recording],
    ) -> Tensor:
        parts = padded_parts(x, padded_batches[0].rows)
        runs = [
            sequence.run(padded, part) for padded, part in zip(padded_batches, parts, strict=True)
        ]
        ctx.fill_in, ctx.rows = [fill_in for _, fill_in in runs], padded_batches[0].rows
        # A copy, which the user may change in place.
        outputs = torch.cat([y for y, _ in runs]) if len(runs) > 1 else runs[0][0].clone()
        return outputs if len(outputs) == len(x) else outputs[: len(x)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        fill_in, ctx.fill_in = ctx.fill_in, None  # drops the activations, as torch does
        if fill_in is None:
            raise RuntimeError(
                "backward ran twice through one forward pass (retain_graph), so gradients would be "
                "counted twice; add the losses up and call backward once"
            )
        for fill_in_padded, part in zip(fill_in, padded_parts(g, ctx.rows), strict=True):
            fill_in_padded(part)
        return (None,) * len(ctx.needs_input_grad)


def _flattens(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _is_sequence(ruled: RuledModel, module: nn.Module) -> bool:
    if type(module) is not nn.Sequential or module in ruled.unit_modules:
        return False
    return "forward" not in vars(module)


def _modules_of(ruled: RuledModel, sequence: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of nested sequences in order, with a unit as one module."""
    for child in vars(sequence)["_modules"].values():  # `children` yields a repeated module once
        if _is_sequence(ruled, child):
            yield from _modules_of(ruled, child)
        else:
            yield child


class KnownGradient(Protocol):
    """Protocol of a loss with a formula for the gradient with respect to the model's outputs."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient (n, ...) of the losses' weighted sum with respect to the outputs.

        Args:
            outputs: outputs of the model (n, ...).
            targets: targets of the examples (n, ...).
            weights: weights of the losses (n,); with None, each weight is 1.
        """
        ...


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return `loss` if it has the method `output_gradient`, and None otherwise."""
    # isinstance with a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None


@dataclass(frozen=True)
class _ScaledLoss:
    """A loss with a closed-form gradient, times a constant."""

    loss: PerExampleLoss
    known: KnownGradient
    factor: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * self.loss(outputs, targets)

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient (n, ...) of the losses' weighted sum with respect to the outputs."""
        return self.factor * self.known.output_gradient(outputs, targets, weights)


def scaled_loss(loss: PerExampleLoss, factor: float) -> PerExampleLoss:
    """Return a loss times a constant, with a closed-form gradient if the loss has one.

    Args:
        loss: function of (outputs, targets) that returns one value per example.
        factor: the constant.
    """
    known = known_gradient(loss)
    if known is None:
        return lambda outputs, targets: factor * loss(outputs, targets)
    return _ScaledLoss(loss, known, factor)


class RuleGradients(PerExampleGradients):
    """Method that computes clipped sums of per-example gradients by layer rules (book-keeping).

    A pass is one forward pass, one backward pass for the gradients of activations, and one weighted
    sum of the gradients of weights. The examples of a padded batch pass through the model together.
    So call `check_isolation` first: it refuses models and losses that couple examples.

    Args:
        model: the model; its trainable parameters become views of `parameters.data`.
        loss: function of (outputs, targets) that returns one value per example.
        parameters: flat layout of `model` if it exists already; None to make it.
        units: names of modules that run through `torch.func`.

    Source: book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at
    Small Cost".
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        parameters: FlatParameters | None = None,
        units: Sequence[str] = (),
    ) -> None:
        super().__init__(model, loss, parameters=parameters)
        self.ruled = RuledModel(model, self.parameters, units)
        self._sequence = ModuleSequence(self.ruled)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the modules that run through `torch.func`."""
        return self.ruled.units

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from parameter index to the gradients of all rows of a padded batch."""
        return by_parameter(self.record(values, padded))

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        """Add each client's weighted sum of unclipped gradients to a tensor in place.

        Args:
            values: flat parameters of each of K clients (K, size).
            padded: padded batch with R rows of each client, and the weights of their losses.
            into: tensor (K, size) to which Σ_i weight_i · gradient_i is added.
        """
        uses = self.record(values, padded)
        views = self.parameters.stacked_views(into)
        with torch.no_grad():
            for use in uses:
                # A function without a value at 0 is not finite in padding rows, and 0 · NaN is NaN.
                g = use.output_gradient if isinstance(use, LayerUse) else None
                if g is None or g.is_cuda or not g.sum().isfinite():
                    use.drop(padded.weights == 0)
                for index in use.parameters:
                    use.add_weighted(index, None, views[index])

    def record(self, values: Tensor, padded: PaddedBatch) -> Sequence[ExampleUse]:
        """Run a forward and a backward pass, and return all layer calls with their gradients.

        Args:
            values: flat parameters of each of K clients (K, size).
            padded: padded batch with R rows of each client.

        Raises:
            UncoveredParameterError: a parameter was used in a way that no rule covers.
        """
        x, y, weights = padded.features, padded.targets, padded.weights
        recording, known = self.ruled.start(values, weights), known_gradient(self.loss)
        if known is not None and self._sequence.is_usable:
            with torch.no_grad():
                with padded.keyed:
                    outputs, backward = self._sequence.run(recording, x)
                backward(known.output_gradient(outputs, y, weights))
            return recording.uses
        with torch.enable_grad():
            with self.ruled.in_place(recording), padded.keyed:
                outputs = self.model(x)
            if known is not None:
                g = known.output_gradient(outputs.detach(), y, weights)
                self.ruled.fill(recording, outputs, g)
            else:
                with padded.keyed:
                    losses = self.loss(outputs, y)
                self.ruled.fill(recording, torch.dot(losses, weights.to(losses.dtype)), None)
        return recording.uses


def by_parameter(uses: Sequence[ExampleUse]) -> dict[int, ExampleUse]:
    """Return a dict from parameter index to per-example gradients, summed over layer calls.

    If a linear layer is called several times, as in a recurrent cell, its calls become one call on
    a longer sequence. For other layers, the gradients of the calls are added.
    """
    result = {index: use for use in uses for index in use.parameters}
    if len(result) == sum([len(use.parameters) for use in uses]):  # each is used once
        return result
    used: dict[int, list[ExampleUse]] = {}
    for use in uses:
        for index in use.parameters:
            used.setdefault(index, []).append(use)
    joined: dict[tuple[int, ...], LinearUse] = {}
    for index, several in used.items():
        if len(several) == 1:
            continue
        linear = [use for use in several if isinstance(use, LinearUse)]
        if len(linear) == len(several) and len({tuple(u.parameters) for u in linear}) == 1:
            key = tuple(map(id, linear))
            if key not in joined:
                joined[key] = LinearUse.joined(linear)
            result[index] = joined[key]
        else:  # the norm of a sum needs the sum itself
            rows = [use.per_example(index) for use in several]
            result[index] = ExampleUse({index: sum(rows[1:], rows[0])})
    return result

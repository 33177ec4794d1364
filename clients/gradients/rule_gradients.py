"""Per-example gradients by layer rules, for one client or several clients at once.

The losses of this module have a formula for the gradient with respect to the model's outputs. With
the formula, torch's backward pass through the loss is not needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PaddedBatch, PerExampleGradients, PerExampleLoss
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.sequence import ModuleSequence


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
    used: dict[int, list[ExampleUse]] = {}
    for use in uses:
        for index in use.parameters:
            used.setdefault(index, []).append(use)
    result: dict[int, ExampleUse] = {}
    joined: dict[tuple[int, ...], LinearUse] = {}
    for index, several in used.items():
        if len(several) == 1:
            result[index] = several[0]
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

"""Per-example gradients by layer rules, for any number of clients at once.

Losses that know their gradient at the outputs save a backward pass of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.layers.base import ExampleUse, LayerUse
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss, Tile
from fedsim.clients.gradients.recording import RuledModel
from fedsim.clients.gradients.sequence import ModuleSequence

_Loss = Callable[[Tensor, Tensor], Tensor]


class KnownGradient(Protocol):
    """A loss that knows its gradient without a backward pass of torch."""

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient at the outputs (n, ...) of the sum of weighted losses."""
        ...


def known_gradient(loss: Any) -> KnownGradient | None:
    """Return the loss if it knows its gradient."""
    # To ask for an instance of a protocol takes as long as the gradient.
    return loss if hasattr(loss, "output_gradient") else None


@dataclass(frozen=True)
class _ScaledLoss:
    """A loss times a constant."""

    loss: _Loss
    factor: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * self.loss(outputs, targets)


@dataclass(frozen=True)
class _ScaledKnownLoss(_ScaledLoss):
    """The same for a loss that knows its gradient."""

    known: KnownGradient

    def output_gradient(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the gradient at the outputs (n, ...) of the sum of weighted losses."""
        return self.factor * self.known.output_gradient(outputs, targets, weights)


def scaled_loss(loss: _Loss, factor: float) -> _Loss:
    """Return a loss times a constant; its gradients are computed in the same way.

    Args:
        loss: one value per example.
        factor: the constant.
    """
    known = known_gradient(loss)
    return _ScaledLoss(loss, factor) if known is None else _ScaledKnownLoss(loss, factor, known)


class RuleGradients(PerExampleGradients):
    """One forward, one backward with respect to activations, one weighted weight gradient.

    The examples of a tile pass through the model together: a model or a loss that couples them must
    be kept out by `check_isolation`.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example.
        parameters: as laid out before; None: they are laid out here.
        units: names of modules that run through `torch.func`.
        stacks: whether a tile may have several clients (see `choice`).

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
        stacks: bool = False,
    ) -> None:
        super().__init__(model, loss, parameters=parameters)
        self.stacks = stacks
        self.ruled = RuledModel(model, self.parameters, units)
        self._sequence = ModuleSequence(self.ruled)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the modules that run through `torch.func`."""
        return self.ruled.units

    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, ExampleUse]:
        """Return the gradients of a tile's rows by parameter; parameters without one are absent."""
        return by_parameter(self.record(values, tile))

    def add_sums(self, values: Tensor, tile: Tile, into: Tensor) -> None:
        """Add Σ_i weight_i · gradient_i of each client's rows to `into` (K, size), not clipped.

        Args:
            values: each client's flat parameters (K, size).
            tile: n = K · R rows and the weights of their losses.
            into: (K, size).
        """
        uses = self.record(values, tile)
        views = self.parameters.stacked_views(into)
        with torch.no_grad():
            for use in uses:
                # What has no value at a row of zeros is not finite there, and 0 times that is NaN.
                g = use.output_gradient if isinstance(use, LayerUse) else None
                if g is None or g.is_cuda or not g.sum().isfinite():
                    use.drop(tile.weights == 0)
                for index in use.parameters:
                    use.add_weighted(index, None, views[index])

    def record(self, values: Tensor, tile: Tile) -> Sequence[ExampleUse]:
        """Return the uses of parameters, filled in by one forward and one backward pass.

        Args:
            values: each client's flat parameters (K, size).
            tile: n = K · R rows.

        Raises:
            UncoveredParameterError: a parameter was used in a way that no rule covers.
        """
        x, y, weights = tile.features, tile.targets, tile.weights
        recording, known = self.ruled.start(values, x.shape[0]), known_gradient(self.loss)
        if known is not None and self._sequence.is_usable:
            with torch.no_grad():
                with tile.keyed:
                    outputs, backward = self._sequence.run(recording, x)
                backward(known.output_gradient(outputs, y, weights))
            return recording.uses
        with torch.enable_grad():
            with self.ruled.in_place(recording), tile.keyed:
                outputs = self.model(x)
            if known is not None:
                g = known.output_gradient(outputs.detach(), y, weights)
                self.ruled.fill(recording, outputs, g)
            else:
                with tile.keyed:
                    losses = self.loss(outputs, y)
                self.ruled.fill(recording, torch.dot(losses, weights.to(losses.dtype)), None)
        return recording.uses


def by_parameter(uses: Sequence[ExampleUse]) -> dict[int, ExampleUse]:
    """Return the gradients of each parameter that was used.

    Uses of one linear layer (a cell over time) are one use of a longer sequence; other repeated
    uses (a table tied to an output layer) are added.
    """
    found: dict[int, list[ExampleUse]] = {}
    for use in uses:
        for index in use.parameters:
            found.setdefault(index, []).append(use)
    result: dict[int, ExampleUse] = {}
    joined: dict[tuple[int, ...], LinearUse] = {}
    for index, several in found.items():
        linear = [use for use in several if isinstance(use, LinearUse)]
        if len(several) == 1:
            result[index] = several[0]
        elif len(linear) == len(several) and len({tuple(u.parameters) for u in linear}) == 1:
            key: Any = tuple(id(use) for use in linear)
            if key not in joined:
                joined[key] = LinearUse.joined(linear)
            result[index] = joined[key]
        else:  # the norm of a sum needs the sum itself
            rows = [use.per_example(index) for use in several]
            result[index] = ExampleUse({index: sum(rows[1:], rows[0])})
    return result

"""Sums of clipped per-example gradients, behind one interface.

Three backends agree: `BookKeeping` (fast; layers on vectors never hold a gradient per example),
`VmapGradients` (any model that vectorises) and `LoopGradients` (any model: the reference).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.lot_factors import LotFactors, LotStatistics, lot_factors
from fedsim.clients.dp_sgd.module_use import Unit, units_in_place
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.tape import Tape
from fedsim.clients.dp_sgd.uses import ExampleUse, by_parameter, squares, without
from fedsim.clients.dp_sgd.uses.base import add_rows

__all__ = [
    "BookKeeping",
    "LoopGradients",
    "LotStatistics",
    "PerExampleGradients",
    "PerExampleLoss",
    "UncoveredParameterError",
    "VmapGradients",
]

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]


_HELD = 1 << 26  # elements of per-example gradients that are held at once: 256 MB in float32


class UncoveredParameterError(RuntimeError):
    """A model used parameters in a way that book-keeping has no rule for.

    Attributes:
        indices: the parameters, by index.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


class PerExampleGradients(ABC):
    """Computes sums of clipped per-example gradients of a model's trainable parameters.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example, from outputs (n, ...) and targets (n, ...).
    """

    def __init__(
        self, model: nn.Module, loss: PerExampleLoss, *, parameters: FlatParameters | None = None
    ) -> None:
        self.model = model
        self.loss = loss
        self.parameters = FlatParameters(model) if parameters is None else parameters
        self._views: tuple[Tensor, list[Tensor]] | None = None

    def add_clipped_sum(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scale: float = 1.0,
    ) -> LotStatistics:
        """Add scale · Σ_i clip(gradient_i) of n ≥ 0 examples to the flat tensor `into` (size,).

        Guarantee: each example's part of what is added has an L2 norm of at most scale · C_m in
        each group m; examples whose gradient is not finite add nothing.
        """
        if len(features) == 0:
            return LotStatistics(0, 0, (0,) * len(groups.bounds))
        if self._views is None or self._views[0] is not into:
            self._views = (into, self.parameters.views(into))
        return self._add(features, targets, clipping, groups, self._views[1], scale)

    @abstractmethod
    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""

    @abstractmethod
    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""

    def _lot_factors(
        self,
        squared_norms: dict[int, Tensor],
        examples: int,
        clipping: Clipping,
        groups: Groups,
        scale: float,
    ) -> LotFactors:
        like = self.parameters.tensors[0]
        return lot_factors(squared_norms, examples, clipping, groups, scale=scale, like=like)

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self.model, parameters, (x.unsqueeze(0),))
        return self.loss(outputs, y.unsqueeze(0)).sum()


class BookKeeping(PerExampleGradients):
    """One forward, one backward with respect to activations, one weighted weight gradient.

    Needs a model whose parameters are all used through operations that `routes` knows, on inputs
    with one row per example, or within `units`; anything else raises `UncoveredParameterError` and
    adds nothing.

    The examples of a lot pass through the model together: a model or a loss that couples them must
    be kept out by `check_isolation`.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example.
        parameters: as laid out before.
        units: layers whose gradients are made by vmap over the layer alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        parameters: FlatParameters | None = None,
        units: Sequence[Unit] = (),
    ) -> None:
        super().__init__(model, loss, parameters=parameters)
        self.units = tuple(units)

    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""
        n = len(features)
        uses = self.record(features, targets)
        with torch.no_grad():
            gradients = by_parameter(uses, self.parameters.tensors)
            norms = {i: of.squared_norms_of(i) for i, of in gradients.items()}
            factors = self._lot_factors(norms, n, clipping, groups, scale)
            if factors.dropped is not None:
                for of in gradients.values():
                    of.drop(factors.dropped)
            for members, column in zip(groups.members, factors.columns, strict=True):
                for i in members:
                    if i in gradients:
                        gradients[i].add_weighted(i, column, into[i])
        return factors.statistics

    def record(self, features: Tensor, targets: Tensor) -> Sequence[ExampleUse]:
        """Return the uses of parameters for a lot, filled in by one forward and one backward.

        Raises:
            UncoveredParameterError: a parameter was used in a way that no rule covers.
        """
        tape = Tape(self.parameters.index, len(features))
        units = units_in_place(self.units, len(features), self.parameters)
        with torch.enable_grad(), units as recorded:
            with tape:
                outputs = self.model(features)
            loss = self.loss(outputs, targets).sum()
        leaves = [leaf for use in recorded for leaf in use.leaves]
        found = tape.backward(loss, (*leaves, *self.parameters.tensors))
        # A gradient that reaches a parameter itself came by a way that no use has seen.
        strayed = found[len(leaves) :]
        missed = [i for i, gradient in enumerate(strayed) if gradient is not None]
        if missed:
            names = ", ".join(self.parameters.names[i] for i in missed)
            raise UncoveredParameterError(
                f"book-keeping has no rule for how {names} is used", tuple(missed)
            )
        gradients = iter(found)
        return [*tape.uses, *(use.filled(gradients) for use in recorded)]

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        rows = features.new_zeros(
            len(features), self.parameters.size, dtype=self.parameters.data.dtype
        )
        places = self.parameters.slices(range(len(self.parameters.tensors)))
        for use in self.record(features, targets):
            with torch.no_grad():
                for index, values in use.per_example().items():
                    rows[:, places[index]] += values.flatten(1)
        return rows


class VmapGradients(PerExampleGradients):
    """All gradients of a lot at once by `torch.func.vmap`; needs a vectorisable model.

    The loss of example i is computed with the example alone in its batch, so no gradient can
    depend on another example, whatever the model or the loss does. Lots are cut so that not more
    than 256 MB of gradients are held at once.
    """

    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""
        most = max(1, _HELD // self.parameters.size)
        total = LotStatistics(0, 0, (0,) * len(groups.bounds))
        for x, y in zip(features.split(most), targets.split(most), strict=True):
            gradients = self._by_parameter(x, y)
            with torch.no_grad():
                total += self._add_gradients(gradients, clipping, groups, into, scale)
        return total

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        return torch.cat([g.flatten(1) for g in self._by_parameter(features, targets)], dim=1)

    def _by_parameter(self, features: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradients (n, *shape) of each parameter."""
        detached = {
            name: parameter.detach()
            for name, parameter in zip(self.parameters.names, self.parameters.tensors, strict=True)
        }
        example_gradient: Callable[..., Any] = grad(self._example_loss)
        found = vmap(example_gradient, in_dims=(None, 0, 0), randomness="different")(
            detached, features, targets
        )
        return [found[name].detach() for name in self.parameters.names]

    def _add_gradients(
        self,
        gradients: Sequence[Tensor],
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        n = len(gradients[0])
        norms = {i: squares(value) for i, value in enumerate(gradients)}
        factors = self._lot_factors(norms, n, clipping, groups, scale)
        dropped = factors.dropped
        for members, column in zip(groups.members, factors.columns, strict=True):
            for i in members:
                value = gradients[i] if dropped is None else without(gradients[i], dropped)
                add_rows(value, column, into[i])
        return factors.statistics


class LoopGradients(VmapGradients):
    """One example at a time by plain autograd: the reference, for any model."""

    def _add(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: list[Tensor],
        scale: float,
    ) -> LotStatistics:
        """As `add_clipped_sum` for n ≥ 1 examples, into one view for each parameter."""
        total = LotStatistics(0, 0, (0,) * len(groups.bounds))
        for x, y in zip(features.split(1), targets.split(1), strict=True):
            gradients = self._by_parameter(x, y)
            with torch.no_grad():
                total += self._add_gradients(gradients, clipping, groups, into, scale)
        return total

    def gradients(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples."""
        rows = [
            torch.cat([g.flatten(1) for g in self._by_parameter(x, y)], dim=1)
            for x, y in zip(features.split(1), targets.split(1), strict=True)
        ]
        return torch.cat(rows)

    def _by_parameter(self, features: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradients (1, *shape) of each parameter for one example."""
        with torch.enable_grad():
            value = self.loss(self.model(features), targets).sum()
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p).unsqueeze(0) for p in self.parameters.tensors]
        found = torch.autograd.grad(value, self.parameters.tensors, materialize_grads=True)
        return [gradient.unsqueeze(0) for gradient in found]

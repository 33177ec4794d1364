"""Sums of clipped per-example gradients, behind one interface.

Three backends agree: `BookKeeping` (fast; layers on vectors never hold a gradient per example),
`VmapGradients` (any model that vectorises) and `LoopGradients` (any model: the reference).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.tape import Tape
from fedsim.clients.dp_sgd.uses import Use, squares, without

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]


class UncoveredParameterError(RuntimeError):
    """A model used a parameter in a way that book-keeping has no rule for."""


@dataclass(frozen=True)
class LotStatistics:
    """What happened to the examples of a lot. Private: to be noised before it goes anywhere.

    Attributes:
        examples: number of examples.
        not_finite: how many contributed zero because their gradient was not finite.
        within: how many had a norm within the bound, by group (m,).
    """

    examples: int
    not_finite: int
    within: tuple[int, ...]

    def __add__(self, other: "LotStatistics") -> "LotStatistics":
        """Return the statistics of two parts of a lot together."""
        within = tuple(a + b for a, b in zip(self.within, other.within, strict=True))
        return LotStatistics(
            self.examples + other.examples, self.not_finite + other.not_finite, within
        )


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
        return self._add(features, targets, clipping, groups, self.parameters.views(into), scale)

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

    def _factors(
        self, squared_norms: dict[int, Tensor], n: int, clipping: Clipping, groups: Groups
    ) -> tuple[Tensor, LotStatistics]:
        """Return the examples' factors by group (n, m), float64, and what happened to them."""
        anyone = next(iter(squared_norms.values()), torch.zeros(n, dtype=torch.float64))
        zeros = torch.zeros_like(anyone)
        norms = torch.stack(
            [
                sum((squared_norms[i] for i in members if i in squared_norms), start=zeros)
                for members in groups.members
            ],
            dim=1,
        ).sqrt_()
        bounds = norms.new_tensor(groups.bounds)
        factors = clipping.coefficients(norms, bounds)
        finite = torch.isfinite(norms).all(1)
        within = ((norms <= bounds) & finite[:, None]).sum(0)
        return factors, LotStatistics(n, n - int(finite.sum()), tuple(within.tolist()))

    def _example_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self.model, parameters, (x.unsqueeze(0),))
        return self.loss(outputs, y.unsqueeze(0)).sum()


class BookKeeping(PerExampleGradients):
    """One forward, one backward with respect to activations, one weighted weight gradient.

    Needs a model whose parameters are all used through operations that `tape` knows, on inputs with
    one row per example; anything else raises `UncoveredParameterError` and adds nothing.

    The examples of a lot pass through the model together: a model or a loss that couples them must
    be kept out by `check_isolation`.
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
        n = len(features)
        uses = self.record(features, targets)
        with torch.no_grad():
            single, reused = _by_reuse(uses)
            norms = {i: value for use in single for i, value in use.squared_norms().items()}
            norms.update({i: squares(value) for i, value in reused.items()})
            factors, statistics = self._factors(norms, n, clipping, groups)
            columns = (factors * scale).to(into[0].dtype).unbind(1)
            by_parameter = {i: columns[m] for m, part in enumerate(groups.members) for i in part}
            if statistics.not_finite:
                for use in single:
                    use.drop(factors[:, 0] == 0)
                reused = {i: without(value, factors[:, 0] == 0) for i, value in reused.items()}
            for use in single:
                use.add_weighted(by_parameter, into)
            for i, value in reused.items():
                into[i].view(-1).addmv_(value.flatten(1).t(), by_parameter[i])
        return statistics

    def record(self, features: Tensor, targets: Tensor) -> list[Use]:
        """Return the uses of parameters for a lot, filled in by one forward and one backward.

        Raises:
            UncoveredParameterError: a parameter was used in a way that no rule covers.
        """
        with torch.enable_grad(), Tape(self.parameters.index, len(features)) as tape:
            loss = self.loss(self.model(features), targets).sum()
        if tape.uncovered:
            names = ", ".join(self.parameters.names[i] for i in sorted(tape.uncovered))
            raise UncoveredParameterError(f"book-keeping has no rule for how {names} is used")
        tape.backward(loss)
        return tape.uses


class VmapGradients(PerExampleGradients):
    """All gradients of a lot at once by `torch.func.vmap`; needs a vectorisable model.

    The loss of example i is computed with the example alone in its batch, so no gradient can
    depend on another example, whatever the model or the loss does.
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
        detached = {
            name: parameter.detach()
            for name, parameter in zip(
                self.parameters.names, self.parameters.tensors, strict=True
            )
        }
        example_gradient: Callable[..., Any] = grad(self._example_loss)
        found = vmap(example_gradient, in_dims=(None, 0, 0), randomness="different")(
            detached, features, targets
        )
        gradients = [found[name] for name in self.parameters.names]
        with torch.no_grad():
            return self._add_gradients(gradients, clipping, groups, into, scale)

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
        factors, statistics = self._factors(norms, n, clipping, groups)
        columns = (factors * scale).to(into[0].dtype).unbind(1)
        for m, members in enumerate(groups.members):
            for i in members:
                value = gradients[i]
                if statistics.not_finite:
                    value = without(value, factors[:, 0] == 0)
                into[i].view(-1).addmv_(value.flatten(1).t(), columns[m])
        return statistics


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
        for x, y in zip(features, targets, strict=True):
            with torch.enable_grad():
                value = self.loss(self.model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
                gradients = torch.autograd.grad(
                    value, self.parameters.tensors, materialize_grads=True
                )
            with torch.no_grad():
                rows = [gradient.unsqueeze(0) for gradient in gradients]
                total += self._add_gradients(rows, clipping, groups, into, scale)
        return total


def _by_reuse(uses: list[Use]) -> tuple[list[Use], dict[int, Tensor]]:
    """Split off parameters that occur in several uses: the norm of a sum needs the sum itself."""
    counts: dict[int, int] = {}
    for use in uses:
        for index in use.parameters:
            counts[index] = counts.get(index, 0) + 1
    repeated = {index for index, count in counts.items() if count > 1}
    if not repeated:
        return uses, {}
    single, sums = [], dict[int, Tensor]()
    for use in uses:
        if repeated.isdisjoint(use.parameters):
            single.append(use)
            continue
        for index, gradients in use.per_example().items():
            sums[index] = sums[index] + gradients if index in sums else gradients
    return single, sums


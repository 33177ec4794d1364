"""One DP-SGD step of many clients at once: stacked parameters, one forward, one backward.

The clients share an architecture. Their lots are padded to one length and pass through the
unchanged model as one batch, client after client; operations with parameters run on the stacked
ones (`cohort_uses`), so each client's examples meet that client's values. Clipping bounds, noise
and random streams stay each client's own, and the result equals one client at a time within
rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.cohort_uses import CohortUse, cohort_use
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.noise import NoiseSource
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example import PerExampleLoss, UncoveredParameterError
from fedsim.clients.dp_sgd.tape import Tape


@dataclass(frozen=True)
class Member:
    """One client of a cohort: its mechanism, its data and its streams of this round."""

    step: DpSgdStep
    features: Tensor
    targets: Tensor
    lots: np.random.Generator
    noise: NoiseSource


class Cohort:
    """The stacked model of several clients.

    Attributes:
        values: each client's flat parameters (clients, size); an optimizer that works entry by
            entry (SGD, Adam) trains all clients through it.

    Args:
        model: the architecture; its own values are every client's first ones.
        loss: one value per example.
        clients: number of clients.

    Raises:
        ValueError: fewer than one client, or parameters of several types.
    """

    def __init__(self, model: nn.Module, loss: PerExampleLoss, *, clients: int) -> None:
        if clients < 1:
            raise ValueError(f"a cohort needs at least one client, got {clients}")
        self.model, self.loss, self.clients = model, loss, clients
        self._parameters = FlatParameters(model)
        self.values: Tensor = self._parameters.data.repeat(clients, 1)
        self._views = self._by_parameter(self.values)

    @property
    def size(self) -> int:
        """Number of trainable values of one client."""
        return self._parameters.size

    def optimizer_parameter(self) -> nn.Parameter:
        """Return `values` as the one parameter of an optimizer; the caller sets its gradient."""
        return nn.Parameter(self.values)

    def release(self, members: Sequence[Member], into: Tensor) -> None:
        """Write each client's noisy gradient into its row of `into` (clients, size).

        Guarantee: row k is what `members[k].step` releases for client k alone, with the same lots
        and the same noise, within rounding; no row depends on another client's data.

        Raises:
            ValueError: not one member for each client, or one with several groups of parameters.
            UncoveredParameterError: the model uses a parameter in a way that has no batched rule.
        """
        if len(members) != self.clients:
            raise ValueError(f"need {self.clients} members, got {len(members)}")
        lots = [m.step.sampling.lot(len(m.features), m.lots) for m in members]
        for row, member in zip(into, members, strict=True):
            member.step.fill_with_noise(self._parameters, member.noise, row)
        longest = max(len(lot) for lot in lots)
        if longest > 0:
            self._add_clipped_sums(members, lots, longest, into)

    def _add_clipped_sums(
        self, members: Sequence[Member], lots: list[np.ndarray], longest: int, into: Tensor
    ) -> None:
        features, targets = self._padded(members, lots, longest)
        uses = self._record(features, targets)
        with torch.no_grad():
            norms = self._norms(uses, len(features))
            spoilt = ~torch.isfinite(norms)
            if spoilt.any():
                for use in uses:
                    use.single.drop(spoilt)
            factors = self._factors(members, lots, norms.view(self.clients, longest))
            parts = self._by_parameter(into)
            for use in uses:
                use.add_weighted(factors, parts)

    def _padded(
        self, members: Sequence[Member], lots: list[np.ndarray], longest: int
    ) -> tuple[Tensor, Tensor]:
        """Return the lots one after the other, each filled up with zeros to `longest`."""
        first = members[0]
        x = first.features.new_zeros(self.clients * longest, *first.features.shape[1:])
        y = first.targets.new_zeros(self.clients * longest, *first.targets.shape[1:])
        for k, (member, lot) in enumerate(zip(members, lots, strict=True)):
            rows = slice(k * longest, k * longest + len(lot))
            index = torch.from_numpy(lot).to(x.device)
            torch.index_select(member.features, 0, index, out=x[rows])
            torch.index_select(member.targets, 0, index, out=y[rows])
        return x, y

    def _record(self, features: Tensor, targets: Tensor) -> list[CohortUse]:
        tape = _CohortTape(self._parameters.index, len(features), self._views)
        with torch.enable_grad(), tape:
            loss = self.loss(self.model(features), targets).sum()
        if tape.uncovered:
            names = ", ".join(self._parameters.names[i] for i in sorted(tape.uncovered))
            raise UncoveredParameterError(f"a cohort has no batched rule for how {names} is used")
        tape.backward(loss)
        uses: list[Any] = tape.uses
        for use in uses:
            use.hand_over()
        seen = [index for use in uses for index in use.single.parameters]
        if len(seen) != len(set(seen)):
            raise UncoveredParameterError("a cohort has no rule for parameters that are used twice")
        return uses

    def _norms(self, uses: list[CohortUse], rows: int) -> Tensor:
        total = torch.zeros(rows, dtype=torch.float64, device=self.values.device)
        for use in uses:
            for index in use.single.parameters:
                total += use.single.squared_norms_of(index)
        return total.sqrt_()

    def _factors(self, members: Sequence[Member], lots: list[np.ndarray], norms: Tensor) -> Tensor:
        """Return each example's factor (clients, lot), scaled by 1 / lot: 0 for padding."""
        factors = torch.zeros_like(norms)
        for k, (member, lot) in enumerate(zip(members, lots, strict=True)):
            groups = member.step.clipping.groups(self._parameters)
            if len(groups.bounds) != 1:
                raise ValueError(
                    "a cohort clips whole gradients; train groups one client at a time"
                )
            own = norms[k, : len(lot)].unsqueeze(1)
            clipped = member.step.clipping.coefficients(own, norms.new_tensor(groups.bounds))
            factors[k, : len(lot)] = clipped.squeeze(1) / member.step.expected_lot
        return factors.to(self.values.dtype)

    def _by_parameter(self, stacked: Tensor) -> list[Tensor]:
        """Return each parameter's part (clients, *shape) of (clients, size), as views."""
        places = self._parameters.slices(range(len(self._parameters.tensors)))
        return [
            stacked[:, at].unflatten(1, parameter.shape)
            for at, parameter in zip(places, self._parameters.tensors, strict=True)
        ]


class _CohortTape(Tape):
    """A tape whose uses run on the stacked parameters."""

    def __init__(self, index: dict[int, int], examples: int, values: list[Tensor]) -> None:
        super().__init__(index, examples)
        self._values = values

    def record(self, use: Any, x: Tensor) -> Tensor | None:
        """Run the batched counterpart of a use and note it; None where there is none."""
        batched = cohort_use(use, self._values)
        return None if batched is None else super().record(batched, x)

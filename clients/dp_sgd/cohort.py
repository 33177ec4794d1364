"""Steps of many clients at once: stacked parameters, one forward, one backward.

The clients share an architecture. Their examples pass through the unchanged model as one batch,
client after client; operations with parameters run on the stacked ones (`cohort_uses`), so each
client's examples meet that client's values. Clipping bounds, noise and random streams stay each
client's own.

Guarantee: on the CPU a client's values after a step are, to the bit, those of the client alone,
whoever else is in the cohort, for models on which `cohorts_agree` holds. That is why a cohort may
be formed, or not, by whatever is fast: no sum runs over clients, a client's products have the shape
that they have alone, and batched products are the same routine.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.chain import chain_of
from fedsim.clients.dp_sgd.cohort_uses import Addition, CohortUse, cohort_use
from fedsim.clients.dp_sgd.gathering import gathering_of
from fedsim.clients.dp_sgd.loss_gradient import loss_gradient
from fedsim.clients.dp_sgd.lot_factors import LotStatistics, lot_norms, row_factors
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.noise import NoiseSource, fill_rows_
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example import PerExampleLoss, UncoveredParameterError
from fedsim.clients.dp_sgd.ragged import Apart, Ragged, Together, aligned
from fedsim.clients.dp_sgd.tape import Tape

# Up to this many values the parameters of clients whose lots are alike are brought together for
# batched products; larger ones are cheaper to multiply one after the other than to copy.
_FEW_VALUES = 1 << 15

# By parameter index: what adds a client's part to the gradient of each.
Additions = list[tuple[int, Addition]]


@dataclass(frozen=True)
class Member:
    """One client of a cohort: its mechanism, its data and its streams of this round.

    `lots` are its lots in order, or, if they are independent of each other, the stream to draw
    them from. Without a mechanism they are batches, and no noise is drawn.
    """

    step: DpSgdStep | None
    features: Tensor
    targets: Tensor
    lots: Iterator[np.ndarray] | np.random.Generator
    noise: NoiseSource | None

    def lot(self) -> np.ndarray:
        """Return the indices of the client's next lot."""
        if not isinstance(self.lots, np.random.Generator):
            return next(self.lots)
        if self.step is None:
            raise ValueError("a member without a mechanism needs its batches")
        return self.step.sampling.lot(len(self.features), self.lots)


class Cohort(ABC):
    """The stacked model of several clients.

    Attributes:
        values: each client's flat parameters in the first `size` columns, zeros in the others; an
            optimizer that works entry by entry (SGD, Adam) trains all clients through it.

    Args:
        model: the architecture.
        loss: one value per example.
        members: the clients.
        parameters: as laid out before; their values are every client's first ones.

    Raises:
        ValueError: no members, or members that cannot go together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        members: Sequence[Member],
        *,
        parameters: FlatParameters | None = None,
    ) -> None:
        if not members:
            raise ValueError("a cohort needs at least one client, got 0")
        self.model, self.loss, self.members = model, loss, tuple(members)
        self._parameters = FlatParameters(model) if parameters is None else parameters
        first = self._parameters.data
        # Rows begin where freshly allocated memory would: see `ragged`.
        stacked = first.new_zeros(len(members), aligned(first.numel()))
        stacked[:, : self.size] = first
        self.values: Tensor = stacked
        tensors = self._parameters.tensors
        slices = self._parameters.slices(range(len(tensors)))
        self._places = [(at, p.shape) for at, p in zip(slices, tensors, strict=True)]
        self._together = self.size <= _FEW_VALUES
        self._clients = tuple(range(len(members)))
        data = [(member.features, member.targets) for member in members]
        self._gathering = gathering_of(data, together=self._together)
        # The values beyond a client's own stay zero in every gradient.
        self._into = torch.zeros_like(stacked if self._together else stacked[:1])
        self._sorted = (torch.zeros_like(self._into), torch.zeros_like(self._into))
        self._row_views = [self._into[0, at].view(shape) for at, shape in self._places]
        self._chain = chain_of(model, self._parameters.index)

    @property
    def size(self) -> int:
        """Number of trainable values of one client."""
        return self._parameters.size

    @property
    def parts(self) -> int:
        """How many tensors `gradients` yields."""
        return 1 if self._together else len(self.members)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of `values`, and the gradients of the next step of the clients they are of.

        A gradient is to be used up before the next one is asked for, which takes its memory. The
        rows that it is for may be changed then: all gradients are as of the first moment.
        """
        lots = [member.lot() for member in self.members]
        return self._all_at_once(lots) if self._together else self._one_by_one(lots)

    def _all_at_once(self, lots: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield everybody's gradients, of clients that were brought together by their lots."""
        order = np.argsort([len(lot) for lot in lots], kind="stable")
        index = torch.from_numpy(order).to(self._into.device)
        values, rows = self._sorted
        torch.index_select(self.values, 0, index, out=values)
        places = order.tolist()
        self._start(places, rows)
        layout = Together([len(lots[k]) for k in places])
        if layout.rows:
            uses = self._record(places, lots, values, layout)
            with torch.no_grad():
                self._add(uses, places, layout, self._by_parameter(rows))
        self._done(places, lots)
        yield self.values, self._into.index_copy_(0, index, rows)

    def _one_by_one(self, lots: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one client's gradient after the other, each made where the last one was.

        The clients' operations without parameters run together. Their gradients never lie beside
        each other in memory, where they would not fit into the processor's cache.
        """
        layout = Apart([len(lot) for lot in lots])
        additions: list[Additions] = [[] for _ in lots]
        if layout.rows:
            uses = self._record(self._clients, lots, self.values, layout)
            with torch.no_grad():
                found = self._additions(uses, self._clients, layout)
            for client, own in zip(layout.clients, found, strict=True):
                additions[client] = own
        for k, values in enumerate(self.values.split(1)):
            with torch.no_grad():
                self._start([k], self._into)
                for index, add in additions[k]:
                    add(self._row_views[index])
            self._done([k], lots[k : k + 1])
            yield values, self._into

    @abstractmethod
    def _start(self, order: Sequence[int], into: Tensor) -> None:
        """Overwrite the clients' values in the rows of `into`, in the order given."""

    @abstractmethod
    def _add(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged, into: list[Tensor]
    ) -> None:
        """Add each client's part of the gradient to its row of each parameter in `into`."""

    @abstractmethod
    def _additions(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged
    ) -> list[Additions]:
        """Return what adds its part of the gradient, of each client with a lot."""

    @abstractmethod
    def _weights(self, order: Sequence[int], layout: Ragged) -> Tensor:
        """Return what the loss of each row is multiplied by (rows,)."""

    def _done(self, order: Sequence[int], lots: Sequence[np.ndarray]) -> None:
        """Learn from the clients' lots of this step, once their gradients are made."""
        return

    def _record(
        self, order: Sequence[int], lots: list[np.ndarray], stacked: Tensor, layout: Ragged
    ) -> list[CohortUse]:
        """Return the uses of parameters, filled in by one forward and one backward pass."""
        features, targets = self._gathering.batch(order, lots, layout)
        weights, values = self._weights(order, layout), self._by_parameter(stacked)
        if self._chain is not None and self._chain.undisturbed:
            return self._chain.record(
                features,
                lambda y: loss_gradient(self.loss, y, targets, self._parameters, weights),
                lambda use: cohort_use(use, values, layout),
            )
        tape = _CohortTape(self._parameters.index, layout, values)
        with torch.enable_grad():
            with tape:
                outputs = self.model(features)
            losses = self.loss(outputs, targets)
            loss = torch.dot(losses, weights)
        if tape.uncovered:
            names = ", ".join(self._parameters.names[i] for i in sorted(tape.uncovered))
            raise UncoveredParameterError(f"a cohort has no rule for how {names} is used")
        strayed = tape.backward(loss, self._parameters.tensors)
        uses: list[Any] = tape.uses
        seen = [index for use in uses for index in use.single.parameters]
        if len(seen) != len(set(seen)) or any(found is not None for found in strayed):
            raise UncoveredParameterError("a cohort has no rule for parameters that are used twice")
        return uses

    def _by_parameter(self, stacked: Tensor) -> list[Tensor]:
        """Return each parameter's part (clients, *shape) of (clients, size), as views."""
        return [stacked[:, at].view(len(stacked), *shape) for at, shape in self._places]


class PrivateCohort(Cohort):
    """A cohort whose gradients are releases of DP-SGD.

    Guarantee: row k of `gradients` is what `members[k].step` releases for client k alone, with the
    same lots and the same noise; no row depends on another client's data.

    Raises:
        ValueError: also when members do not clip alike; their bounds may differ.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        members: Sequence[Member],
        *,
        parameters: FlatParameters | None = None,
    ) -> None:
        super().__init__(model, loss, members, parameters=parameters)
        pairs = [(m.step, m.noise) for m in members if m.step is not None and m.noise is not None]
        if len(pairs) != len(members):
            raise ValueError("every member of a private cohort needs a mechanism and noise")
        self._steps = [step for step, _ in pairs]
        self._noises = [noise for _, noise in pairs]
        if len({step.clipping.kind for step in self._steps}) > 1:
            raise ValueError("members of a cohort must clip alike")
        self._groups = [step.groups(self._parameters) for step in self._steps]
        sigmas = [
            step.standard_deviations(groups)
            for step, groups in zip(self._steps, self._groups, strict=True)
        ]
        self._uniform = all(len(set(own)) == 1 for own in sigmas)
        self._deviations = [  # of a client's noise, where all groups share it
            own[0] / step.expected_lot for own, step in zip(sigmas, self._steps, strict=True)
        ]
        like = {"dtype": torch.float64, "device": self.values.device}
        self._bounds = torch.tensor([groups.bounds for groups in self._groups], **like)
        self._scales = torch.tensor([[1.0 / step.expected_lot] for step in self._steps], **like)
        self._adapts = any(step.clipping.learnt is not None for step in self._steps)
        self._within = np.zeros(len(members), dtype=np.int64)  # by client, of the step under way

    @property
    def steps(self) -> tuple[DpSgdStep, ...]:
        """Each client's mechanism for its next step."""
        return tuple(self._steps)

    def _done(self, order: Sequence[int], lots: Sequence[np.ndarray]) -> None:
        if not self._adapts:
            return
        for k, lot in zip(order, lots, strict=True):
            seen = LotStatistics(len(lot), 0, (int(self._within[k]),))
            self._within[k] = 0
            self._adapt(k, self._steps[k].adapted(seen, self._noises[k]))

    def _adapt(self, client: int, step: DpSgdStep) -> None:
        """Go on with another clipping."""
        groups = step.groups(self._parameters)
        self._steps[client], self._groups[client] = step, groups
        self._deviations[client] = step.standard_deviation(groups) / step.expected_lot
        self._bounds[client] = self._bounds.new_tensor(groups.bounds)

    def _start(self, order: Sequence[int], into: Tensor) -> None:
        """Overwrite the rows of `into` with noise."""
        own = into[:, : self.size]
        if self._uniform:
            sources = [self._noises[k] for k in order]
            fill_rows_(sources, own, [self._deviations[k] for k in order])
            return
        for row, k in zip(own, order, strict=True):
            self._steps[k].fill_with_noise(self._parameters, self._noises[k], row)

    def _add(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged, into: list[Tensor]
    ) -> None:
        """Add each client's clipped gradients."""
        for use, index, column in self._clipped(uses, order, layout):
            use.add_weighted(index, column, into[index])

    def _additions(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged
    ) -> list[Additions]:
        """Return what adds its clipped gradients, of each client with a lot."""
        found: list[Additions] = [[] for _ in layout.clients]
        for use, index, column in self._clipped(uses, order, layout):
            for own, addition in zip(found, use.weighted(index, column), strict=True):
                own.append((index, addition))
        return found

    def _clipped(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged
    ) -> Iterator[tuple[CohortUse, int, Tensor]]:
        """Yield each parameter's use and index, and what each row's gradient is scaled by."""
        of = {index: use for use in uses for index in use.single.parameters}
        members, like = self._groups[0].members, self._parameters.tensors[0]
        squared = {index: of[index].squared_norms_of(index) for index in sorted(of)}
        norms = lot_norms(squared, layout.rows, members, like)
        # What only fills up is no example: whatever came of it must not look like a broken one.
        norms.masked_fill_(~torch.from_numpy(layout.real).to(norms.device).unsqueeze(1), 0.0)
        places = torch.as_tensor(order, device=self.values.device)
        bounds = layout.per_row(self._bounds[places])
        scales = layout.per_row(self._scales[places])
        clipping = self._steps[0].clipping
        columns, dropped = row_factors(norms, clipping, bounds, scale=scales, like=like)
        if self._adapts:  # then there is one group
            inside = (norms <= bounds)[:, 0].cpu().numpy() & layout.real
            self._within += np.bincount(
                np.asarray(order)[layout.owners[inside]], minlength=len(self.members)
            )
        if dropped is not None:
            for use in uses:
                use.drop(dropped)
        for group, column in zip(members, columns, strict=True):
            for index in group:
                if index in of:
                    yield of[index], index, column

    def _weights(self, order: Sequence[int], layout: Ragged) -> Tensor:
        """Return 1 for each example: sums of losses keep them apart."""
        return torch.from_numpy(layout.real).to(self.values)


class PlainCohort(Cohort):
    """A cohort whose gradients are those of the mean loss of each client's batch."""

    def _start(self, order: Sequence[int], into: Tensor) -> None:
        """Overwrite the rows of `into` with zeros."""
        into.zero_()

    def _add(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged, into: list[Tensor]
    ) -> None:
        """Add each client's gradient."""
        for use in uses:
            for index in use.single.parameters:
                use.write_gradient(index, into[index])

    def _additions(
        self, uses: list[CohortUse], order: Sequence[int], layout: Ragged
    ) -> list[Additions]:
        """Return what writes its gradient, of each client with a batch."""
        found: list[Additions] = [[] for _ in layout.clients]
        for use in uses:
            for index in use.single.parameters:
                for own, addition in zip(found, use.written(index), strict=True):
                    own.append((index, addition))
        return found

    def _weights(self, order: Sequence[int], layout: Ragged) -> Tensor:
        """Return 1 / (the client's batch) for each example."""
        lengths = np.bincount(layout.owners[layout.real], minlength=len(order))
        weights = layout.per_row(torch.from_numpy(lengths).to(self.values).reciprocal_())
        return weights.masked_fill_(~torch.from_numpy(layout.real).to(weights.device), 0.0)


class _CohortTape(Tape):
    """A tape whose uses run on the stacked parameters."""

    def __init__(self, index: dict[int, int], layout: Ragged, values: list[Tensor]) -> None:
        super().__init__(index, layout.rows)
        self._layout, self._values = layout, values

    def record(self, use: Any, x: Tensor) -> Tensor | None:
        """Run the counterpart of a use and note it; None where there is none."""
        stacked = cohort_use(use, self._values, self._layout)
        return None if stacked is None else super().record(stacked, x)

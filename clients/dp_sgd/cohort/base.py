"""What all cohorts do: forward and backward of the stacked model, lot by lot."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.cohort.gathering import gathering_of
from fedsim.clients.dp_sgd.cohort.ragged import Apart, Ragged, Together, aligned
from fedsim.clients.dp_sgd.cohort.uses import Addition, CohortUse, cohort_use
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise import NoiseSource
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.chain import chain_of
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleLoss, UncoveredParameterError
from fedsim.clients.dp_sgd.per_example.loss_gradient import loss_gradient
from fedsim.clients.dp_sgd.per_example.tape import Tape

# Up to this many values the parameters of clients whose lots are alike are brought together for
# batched products; larger ones are cheaper to multiply one after the other than to copy.
FEW_VALUES = 1 << 15

# By parameter index: what adds a client's part to the gradient of each.
Additions = list[tuple[int, Addition]]


@dataclass(frozen=True)
class Member:
    """One client of a cohort: its mechanism, its data and its streams of this round.

    `lots` are its lots in order, or, if they are independent of each other, the stream to draw
    them from. Without a mechanism they are batches, and no noise is drawn.
    """

    step: DpSgdMechanism | None
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
        self._together = self.size <= FEW_VALUES
        self._clients = tuple(range(len(members)))
        data = [(member.features, member.targets) for member in members]
        self._gathering = gathering_of(data, together=self._together)
        # The values beyond a client's own stay zero in every gradient.
        self._into = torch.zeros_like(stacked if self._together else stacked[:1])
        self._row_views = [self._into[0, at].view(shape) for at, shape in self._places]
        self._chain = chain_of(model, self._parameters.index)

    @property
    def size(self) -> int:
        """Number of trainable values of one client."""
        return self._parameters.size

    @cached_property
    def _in_order(self) -> tuple[Tensor, Tensor]:
        """Room for everybody's values and gradients in the order of a step's lots."""
        return torch.zeros_like(self.values), torch.zeros_like(self.values)

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
        values, rows = self._in_order
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


class _CohortTape(Tape):
    """A tape whose uses run on the stacked parameters."""

    def __init__(self, index: dict[int, int], layout: Ragged, values: list[Tensor]) -> None:
        super().__init__(index, layout.rows)
        self._layout, self._values = layout, values

    def record(self, use: Any, x: Tensor) -> Tensor | None:
        """Run the counterpart of a use and note it; None where there is none."""
        stacked = cohort_use(use, self._values, self._layout)
        return None if stacked is None else super().record(stacked, x)

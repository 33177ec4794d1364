"""A cohort of clients with DP-SGD."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.cohort.base import Additions, Cohort, Member
from fedsim.clients.dp_sgd.cohort.ragged import Ragged
from fedsim.clients.dp_sgd.cohort.uses import CohortUse
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise import fill_rows_
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics, lot_norms, row_factors
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleLoss


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
        self._adapts = any(step.clipping.adapted_clip_norm is not None for step in self._steps)
        self._within = np.zeros(len(members), dtype=np.int64)  # by client, of the step under way

    @property
    def steps(self) -> tuple[DpSgdMechanism, ...]:
        """Each client's mechanism for its next step."""
        return tuple(self._steps)

    def _done(self, order: Sequence[int], lots: Sequence[np.ndarray]) -> None:
        if not self._adapts:
            return
        for k, lot in zip(order, lots, strict=True):
            seen = LotStatistics(len(lot), 0, (int(self._within[k]),))
            self._within[k] = 0
            self._adapt(k, self._steps[k].adapt(seen, self._noises[k]))

    def _adapt(self, client: int, step: DpSgdMechanism) -> None:
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

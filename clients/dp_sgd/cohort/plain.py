"""A cohort of clients without privacy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.cohort.base import Additions, Cohort
from fedsim.clients.dp_sgd.cohort.ragged import Ragged
from fedsim.clients.dp_sgd.cohort.uses import CohortUse


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

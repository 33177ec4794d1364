"""Clipping norms and scales of DP-SGD steps, for clients that train together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics, ClipBounds, ClippedRows
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.noise.release import Scales


class Padded(Protocol):
    """Protocol of a padded batch, or of the record of a pass over a padded batch."""

    @property
    def example_weights(self) -> Tensor:
        """Weight of each example (K · R,): 1, or 0 for a row of padding."""
        ...


@dataclass(frozen=True)
class StepTerms:
    """Clipping norms and scales of K clients in a step, in m parameter groups.

    Attributes:
        clients: number of clients K.
        bounds: clipping norms of the rows of a padded batch, and the scales that turn clipped
            gradients into steps of the integer grid.
        scales: scales that turn noisy sums of whole grid steps into releases.
        counts: whether a step counts unclipped gradients.
    """

    clients: int
    bounds: ClipBounds
    scales: Scales
    counts: bool

    @classmethod
    def of(
        cls,
        mechanisms: Sequence[DpSgdMechanism | None],
        parameters: FlatParameters,
        rows: int,
        *,
        divides: bool = True,
        counts: bool = False,
    ) -> Self:
        """Return the terms of the clients' mechanisms.

        Args:
            mechanisms: mechanism of each client; an entry is None where the client is absent.
            parameters: the model's trained parameters.
            rows: number of rows of each client in a padded batch.
            divides: whether sums are divided by the expected batch size; otherwise a release is a
                whole number of grid steps.
            counts: whether steps count unclipped gradients without adaptive clipping, too.
        """
        present = [mechanism for mechanism in mechanisms if mechanism is not None]
        first = present[0].groups(parameters)
        lengths, norms, shares = list[Sequence[float]](), list[Sequence[float]](), list[float]()
        for mechanism in mechanisms:
            groups = first if mechanism is None else mechanism.groups(parameters)
            absent = (1.0,) * len(first.bounds)
            lengths.append(absent if mechanism is None else mechanism.grid_steps(groups))
            norms.append(groups.bounds)
            shares.append(0.0 if mechanism is None else 1.0 / mechanism.expected_batch)
        like = parameters.tensors[0].new_empty(0, dtype=torch.float64)
        grid_steps = like.new_tensor(lengths)

        def by_row(values: Tensor) -> Tensor:
            return values.repeat_interleave(rows, 0, output_size=len(values) * rows)

        divided = torch.ones_like(grid_steps)
        if divides:
            divided = grid_steps * like.new_tensor(shares).unsqueeze(1)
        slices = parameters.group_slices(first.members)
        return cls(
            len(mechanisms),
            ClipBounds(
                present[0].clipping,
                first.members,
                by_row(like.new_tensor(norms)),
                by_row(grid_steps.reciprocal()),
            ),
            Scales(divided[:, [m for _, m in slices]], [place.stop for place, _ in slices]),
            counts or any(mechanism.clipping.count_noises for mechanism in present),
        )

    def bounds_of(self, padded: Padded) -> ClipBounds:
        """Return the clipping norms and scales for a padded batch; rows of padding have scale 0."""
        return replace(self.bounds, scales=self.bounds.scales * padded.example_weights.unsqueeze(1))

    def count(self, rows: ClippedRows, bounds: ClipBounds) -> Tensor:
        """Return how many gradients of each client are not finite, then unclipped in each group.

        Args:
            rows: the clipped gradients of a padded batch.
            bounds: clipping norms and scales of its rows.

        Returns:
            The counts (1 + m, K), which are private.
        """
        lost = rows.norms[:, :1].isnan()
        seen = torch.cat([lost, rows.norms <= bounds.bounds], 1) & (bounds.scales[:, :1] > 0)
        return seen.view(self.clients, -1, seen.shape[1]).sum(1).T.cpu()

    def statistics(self, counted: Sequence[Tensor], sizes: Sequence[int]) -> list[BatchStatistics]:
        """Return each client's counts over all padded batches; an empty list without `counts`."""
        if not self.counts:
            return []
        start = torch.zeros(1 + len(self.bounds.members), self.clients, dtype=torch.int64)
        lost, *within = sum(counted, start).tolist()
        groups = zip(*within, strict=True)
        return [BatchStatistics(*of_client) for of_client in zip(sizes, lost, groups, strict=True)]

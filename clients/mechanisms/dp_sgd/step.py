"""DP-SGD step of several clients that train together (Abadi et al. 2016, Algorithm 1).

C is the clipping norm, z the noise multiplier, σ = z C, and L the expected batch size.

draw        a batch of each client, with the sampling that is charged (done by `training.block`)
gradient    g_i of each example i of the batch
clip        g_i · min(1, C / ‖g_i‖), in each group of parameters; a factor of each g_i, not a copy
sum         S = sum of the clipped g_i, in steps of an integer grid, each of length σ / 2²⁴
noise       rint(S) + Z, with Z rounded normals of deviation σ, which is 2²⁴ grid steps
divide      by the public expected batch size L, and multiply by the length of a grid step
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics, ClipBounds, ClippedRows
from fedsim.clients.mechanisms.dp_sgd.batch_sums import BatchSums
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.noise.release import Scales, release_
from fedsim.noise.sources import NoiseSource


class Padded(Protocol):
    """Protocol of a padded batch, or of the record of a pass over a padded batch."""

    @property
    def example_weights(self) -> Tensor:
        """Weight of each example (K · R,): 1, or 0 for a row of padding."""
        ...


BatchT = TypeVar("BatchT", bound=Padded)
Clip = Callable[[BatchT, ClipBounds], ClippedRows]
"""Maps a padded batch and clipping norms to the clipped per-example gradients."""
Use = Callable[[slice, Tensor], None]
"""Gets a slice of the clients, and their sums or releases (k, size)."""


class PrivateStep:
    """DP-SGD steps of K clients that train together, each with a separate mechanism.

    Federations and `PrivacyEngine` both use this class. Only this class turns the clipped gradients
    of a client's batch into a release.

    Guarantee: the release of a client in a step has the privacy event of the client's mechanism. It
    is a function of that client's batch, parameters and noise alone, to the last bit.

    Attributes:
        counts: whether steps count unclipped gradients, as adaptive clipping needs.

    Args:
        parameters: the model's trained parameters.
        mechanisms: the mechanism of each client; an entry is None where the client is absent.
        rows: number of rows of each client in a padded batch.
        divides: whether a release is the noisy mean gradient (the sum divided by the expected batch
            size); otherwise it is the noisy sum, as whole numbers of integer-grid steps.
        keeps: whether each release gets new memory, so that it may be used after the step. The
            gradients of each client are then added up separately.
        counts: whether steps count unclipped gradients without adaptive clipping, too.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        mechanisms: Sequence[DpSgdMechanism | None],
        rows: int,
        *,
        divides: bool = True,
        keeps: bool = False,
        counts: bool = False,
    ) -> None:
        self._parameters, self._rows, self._always_counts = parameters, rows, counts
        self._divides, self._keeps = divides, keeps
        roundings = [None if mechanism is None else mechanism.rounding for mechanism in mechanisms]
        self._sums = BatchSums(parameters, roundings, rows, apart=keeps)
        height = len(mechanisms) if self._sums.together else 1
        kind = parameters.tensors[0].dtype if divides else torch.float64
        self._released = parameters.tensors[0].new_empty(height, parameters.size, dtype=kind)
        self.use(mechanisms)

    def use(self, mechanisms: Sequence[DpSgdMechanism | None]) -> None:
        """Set the mechanism of each client for the next steps; None where the client is absent."""
        present = [mechanism for mechanism in mechanisms if mechanism is not None]
        groups = [
            None if mechanism is None else mechanism.groups(self._parameters)
            for mechanism in mechanisms
        ]
        first = next(group for group in groups if group is not None)
        grid_lengths = [
            (1.0,) * len(first.bounds)
            if mechanism is None or group is None
            else mechanism.grid_steps(group)
            for mechanism, group in zip(mechanisms, groups, strict=True)
        ]
        batches = [
            [0.0] if mechanism is None else [1.0 / mechanism.expected_batch]
            for mechanism in mechanisms
        ]
        units, bounds, shares = (
            torch.tensor(table, dtype=torch.float64, device=self._released.device)
            for table in (grid_lengths, [(group or first).bounds for group in groups], batches)
        )
        scales = self._by_row(units.reciprocal())
        self._bounds = ClipBounds(present[0].clipping, first.members, self._by_row(bounds), scales)
        divided = units * shares if self._divides else torch.ones_like(units)
        places = self._parameters.group_slices(first.members)
        self._release_scales: Scales = [(place, divided[:, m : m + 1]) for place, m in places]
        self.counts = self._always_counts or any(m.clipping.count_noises for m in present)

    @torch.no_grad()
    def take(
        self,
        clip: Clip[BatchT],
        padded_batches: Iterable[BatchT],
        sizes: Sequence[int],
        noises: Sequence[NoiseSource | None] | None,
        use: Use,
        *,
        earlier: Mapping[int, Tensor] | None = None,
    ) -> list[BatchStatistics]:
        """Compute a step of every client, and pass the noisy gradients to the function `use`.

        Args:
            clip: function that computes the clipped gradients of a padded batch.
            padded_batches: the padded batches that together hold the clients' batches.
            sizes: number of examples in each client's batch (K,).
            noises: the noise source of each client; an entry is None where no noise is added. With
                None in place of the sequence, nothing is released: sums are passed to `use` in grid
                steps, and a later call, which releases them, takes them as `earlier`.
            use: function that gets a slice of the clients and their releases (k, size): each client
                of a large model by itself, in any order, and all clients of a small model at once.
                The next releases overwrite these.
            earlier: by client, the sum (1, size) of an earlier part of the batch, float64, to which
                the clipped gradients of `padded_batches` are added in place.

        Returns:
            With `counts`, the counts of the examples of each client in `padded_batches`; otherwise
            an empty list.
        """
        counted = torch.zeros(1 + len(self._bounds.members), len(sizes), dtype=torch.int64)
        if self._keeps:
            self._released = torch.empty_like(self._released)
        self._sums.begin(sizes, earlier)
        for padded in padded_batches:
            weights = padded.example_weights.unsqueeze(1)  # 0 marks a row of padding
            bounds = replace(self._bounds, scales=self._bounds.scales * weights)
            rows = clip(padded, bounds)
            if self.counts:
                lost = rows.norms[:, :1].isnan()
                seen = torch.cat([lost, rows.norms <= bounds.bounds], 1) & (weights > 0)
                counted += seen.view(len(sizes), self._rows, -1).sum(1).T.cpu()
            self._release(self._sums.add(rows), noises, use)
        self._release(self._sums.end(), noises, use)
        if self._sums.together and noises is not None:
            use(slice(0, len(sizes)), self._released)
        if not self.counts:
            return []
        lost, *within = counted.tolist()
        groups = zip(*within, strict=True)
        return [BatchStatistics(*counts) for counts in zip(sizes, lost, groups, strict=True)]

    def _release(
        self,
        sums: Iterator[tuple[slice, Tensor]],
        noises: Sequence[NoiseSource | None] | None,
        use: Use,
    ) -> None:
        """Add noise to the sums of whole batches, and scale them to releases."""
        for clients, total in sums:
            if noises is None:
                use(clients, total)
                continue
            scales = [(place, factors[clients]) for place, factors in self._release_scales]
            into = self._released[clients] if self._sums.together else self._released[:1]
            release_(total, noises[clients], scales, into)
            if not self._sums.together:
                use(clients, into)

    def _by_row(self, values: Tensor) -> Tensor:
        """Return values of clients (K, m) repeated for each row of a padded batch (K · R, m)."""
        return values.repeat_interleave(self._rows, 0, output_size=len(values) * self._rows)

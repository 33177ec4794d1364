"""Clipping norms, scales and gradient norms of DP-SGD steps, and sums of clipped gradients.

Sums are in float32 if rounding errors stay small.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from fedsim.clients.gradients.layers.base import Part
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics, ClipBounds, ClippedRows
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.noise.release import Scales, equal_runs
from fedsim.noise.sources import SUM_HEIGHTS, SumRounding

_SMALL = 1 << 14  # largest size of a model for which one call adds up all clients


class BatchSums:
    """Sums of the clipped gradients of one batch for each of K clients that train together.

    Guarantee: the sum of a client is a function of that client's rows and of the public shape of
    the padded batches, to the last bit.

    Attributes:
        together: whether one call adds up the gradients of all clients, as for small models and on
            a GPU.
        sizes: number of examples in each client's batch (K,), as given to `begin`.

    Args:
        parameters: the model's trained parameters.
        roundings: rounding bound of each client's sums; an entry is None where the client is
            absent.
        rows: number of rows of each client in a padded batch.
        apart: whether the gradients of each client are added up separately, for models of any size.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        roundings: Sequence[SumRounding | None],
        rows: int,
        *,
        apart: bool = False,
    ) -> None:
        self._parameters, self._size = parameters, parameters.size
        like, clients = parameters.tensors[0], len(roundings)
        is_single = like.dtype == torch.float32 and products_are_exact(like.device)
        self._heights = [SUM_HEIGHTS[0] if one is None else one.height for one in roundings]
        self._most = [
            min(rounding.rows, rows) if rounding is not None and is_single else 0
            for rounding in roundings
        ]
        self.together = not apart and (like.is_cuda or self._size <= _SMALL)
        self._cached = like.new_empty(clients if self.together else 1, self._size)
        self._cached_views = self._views(self._cached)
        self.begin([0] * clients)

    def new_releases(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the releases that come at once: of all clients, or of one (k, size)."""
        return torch.empty_like(self._cached, dtype=dtype)

    def begin(self, sizes: Sequence[int], earlier: Mapping[int, Tensor] | None = None) -> None:
        """Reset the sums before the next step.

        Args:
            sizes: number of examples in each client's batch (K,), not counting those in `earlier`.
            earlier: by client, the sum (1, size) of an earlier part of the batch, float64, to which
                the rest of the batch is added in place.
        """
        self.sizes, self._waits = sizes, True
        self._long = dict(earlier or {})
        for k, (size, most) in enumerate(zip(sizes, self._most, strict=True)):
            if size > most and k not in self._long:
                self._long[k] = self._cached.new_zeros(1, self._size, dtype=torch.float64)

    def add(self, rows: ClippedRows | None) -> Iterator[tuple[slice, Tensor]]:
        """Add a padded batch to the sums, and yield those sums that are now complete.

        Args:
            rows: the clipped gradients of the padded batch, or None to add nothing.

        Yields:
            Pairs of a slice of the clients and their sums (k, size). The next sums overwrite these.
        """
        for k, total in self._long.items():
            if rows is not None:
                rows.add_to(self._views(total), Part(k))
        if self._waits:  # the first padded batch has the whole of all short batches
            self._waits = False
            yield from self._short(rows)

    def end(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sums that `add` has not yielded yet, as pairs (slice of clients, sums)."""
        yield from self.add(None)
        for k, total in self._long.items():
            yield slice(k, k + 1), total

    def _short(self, rows: ClippedRows | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sums of batches that fit into one padded batch."""
        heights = [None if k in self._long else of for k, of in enumerate(self._heights)]
        if self.together:
            for height in sorted({of for of in heights if of is not None}):
                if rows is None:
                    self._cached.zero_()
                else:
                    rows.add_to(self._cached_views, Part(height=height), overwrite=True)
                for of_run, run in equal_runs(heights):
                    if of_run == height:
                        yield run, self._cached[run]
            return
        for k, height in enumerate(heights):
            if height is None:
                continue
            if rows is None or not self.sizes[k]:
                self._cached.zero_()
            else:
                part = Part(k, slice(0, self.sizes[k]), height)
                rows.add_to(self._cached_views, part, overwrite=True)
            yield slice(k, k + 1), self._cached

    def _views(self, sums: Tensor) -> list[Tensor]:
        return self._parameters.stacked_views(sums)


def products_are_exact(device: torch.device) -> bool:
    """Whether float32 matrix products are computed in float32, not in TF32 or bfloat16."""
    mkldnn = torch.backends.mkldnn
    kinds = (torch.backends, mkldnn, getattr(mkldnn, "matmul", None))
    if device.type == "cuda":
        kinds = (*kinds, torch.backends.cuda.matmul)
    if any(getattr(kind, "fp32_precision", "none") not in ("none", "ieee") for kind in kinds):
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # both ways of setting it were used
        return False


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
        bounds: clipping norms of the rows of a padded batch, and the scales that turn clipped
            gradients into steps of the integer grid.
        scales: scales that turn noisy sums of whole grid steps into releases.
    """

    bounds: ClipBounds
    scales: Scales

    @classmethod
    def of(
        cls,
        mechanisms: Sequence[DpSgdMechanism | None],
        parameters: FlatParameters,
        rows: int,
        *,
        divides: bool = True,
    ) -> Self:
        """Return the terms of the clients' mechanisms.

        Args:
            mechanisms: mechanism of each client; an entry is None where the client is absent.
            parameters: the model's trained parameters.
            rows: number of rows of each client in a padded batch.
            divides: whether sums are divided by the expected batch size; otherwise a release is a
                whole number of grid steps.
        """
        present = [mechanism for mechanism in mechanisms if mechanism is not None]
        first = present[0].groups(parameters)
        absent, terms = ((1.0,) * len(first.bounds), first.bounds, 0.0), {}
        for mechanism in {id(one): one for one in present}.values():  # many clients share one
            groups = mechanism.groups(parameters)
            share = 1.0 / mechanism.expected_batch
            terms[id(mechanism)] = mechanism.grid_steps(groups), groups.bounds, share
        each = [absent if one is None else terms[id(one)] for one in mechanisms]
        lengths, norms, shares = zip(*each, strict=True)
        like = parameters.tensors[0].new_empty(0, dtype=torch.float64)
        grid_steps = like.new_tensor(lengths)

        def by_row(values: Tensor) -> Tensor:
            return values.repeat_interleave(rows, 0, output_size=len(values) * rows)

        divided = torch.ones_like(grid_steps)
        if divides:
            divided = grid_steps * like.new_tensor(shares).unsqueeze(1)
        slices = parameters.group_slices(first.members)
        return cls(
            ClipBounds(
                present[0].clipping,
                first.members,
                by_row(like.new_tensor(norms)),
                by_row(grid_steps.reciprocal()),
            ),
            Scales(divided[:, [m for _, m in slices]], [place.stop for place, _ in slices]),
        )

    def bounds_of(self, padded: Padded) -> ClipBounds:
        """Return the clipping norms and scales for a padded batch; rows of padding have scale 0."""
        bounds = self.bounds
        scales = bounds.scales * padded.example_weights.unsqueeze(1)
        return ClipBounds(bounds.clipping, bounds.members, bounds.bounds, scales)


@dataclass(frozen=True)
class StepNorms:
    """Gradient norms of the examples of K clients in a step; they are private.

    Attributes:
        sizes: number of examples in each client's batch (K,).
        groups: number of parameter groups m.
        seen: for each padded batch, the gradient norms of its rows (n, m), and its clipping norms.
    """

    sizes: Sequence[int]
    groups: int
    seen: list[tuple[Tensor, ClipBounds]] = field(default_factory=list[tuple[Tensor, ClipBounds]])

    def statistics(self) -> list[BatchStatistics]:
        """Return each client's counts of examples and of unclipped gradients."""
        total = torch.zeros(1 + self.groups, len(self.sizes), dtype=torch.int64)
        for norms, clip in self.seen:
            counted = torch.cat([norms[:, :1].isnan(), norms <= clip.bounds], 1)
            counted &= clip.scales[:, :1] > 0
            total += counted.view(len(self.sizes), -1, 1 + self.groups).sum(1).T.cpu()
        lost, *within = total.tolist()
        each = zip(self.sizes, lost, zip(*within, strict=True), strict=True)
        return [BatchStatistics(*of_client) for of_client in each]

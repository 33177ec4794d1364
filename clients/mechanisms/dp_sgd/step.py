"""DP-SGD step of several clients that train together (Abadi et al. 2016, Algorithm 1).

C is the clipping norm, z the noise multiplier, σ = z C, and L the expected batch size.

draw        a batch of each client, with the sampling that is charged (done by `training.block`)
gradient    g_i of each example i of the batch
clip        g_i · min(1, C / ‖g_i‖), in each group of parameters; a factor of each g_i, not a copy
sum         S = sum of the clipped g_i, in steps of an integer grid, each of length σ / 2²⁴
noise       rint(S) + Z, with Z rounded normals of deviation σ, which is 2²⁴ grid steps
divide      by the public expected batch size L, and multiply by the length of a grid step
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedsim.clients.gradients.per_example import ClipBounds, ClippedRows
from fedsim.clients.mechanisms.dp_sgd.batch_sums import BatchSums, Padded, StepNorms, StepTerms
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource

BatchT = TypeVar("BatchT", bound=Padded)
Clip = Callable[[BatchT, ClipBounds], ClippedRows]
"""Maps a padded batch and clipping norms to the clipped per-example gradients."""
Use = Callable[[slice, Tensor], None]
"""Gets a slice of the clients, and their sums or releases (k, size)."""


@dataclass(frozen=True)
class PrivateStep:
    """DP-SGD step of K clients, of federations and of `PrivacyEngine`.

    Guarantee: the release of a client has the privacy event of the client's mechanism. It is a
    function of that client's batch, parameters and noise alone, to the last bit.

    Attributes:
        terms: clipping norms and scales of the clients.
        sums: the sums of the clients' batches, after `begin`.
        into: memory for releases (k, size), of all clients if `sums.together`, else of one.
        noises: noise source of each client; an entry is None where no noise is added. With None in
            place of the sequence, `use` gets the sums in grid steps, and nothing is released.
        use: function that gets the releases: of each client of a large model by itself, in any
            order, and of all clients of a small model at once.
    """

    terms: StepTerms
    sums: BatchSums
    into: Tensor
    noises: Sequence[NoiseSource | None] | None
    use: Use

    @torch.no_grad()
    def take(self, clip: Clip[BatchT], batches: Iterable[BatchT]) -> StepNorms:
        """Take the step, and return the gradient norms of its examples."""
        norms = StepNorms(self.sums.sizes, len(self.terms.bounds.members))
        for padded in batches:
            bounds = self.terms.bounds_of(padded)
            rows = clip(padded, bounds)
            norms.seen.append((rows.norms, bounds))
            self._release(self.sums.add(rows))
        self._release(self.sums.end())
        if self.sums.together and self.noises is not None:
            self.use(slice(0, len(self.into)), self.into)
        return norms

    def _release(self, sums: Iterator[tuple[slice, Tensor]]) -> None:
        """Add noise to the sums of whole batches, and scale them to releases."""
        for clients, total in sums:
            if self.noises is None:
                self.use(clients, total)
                continue
            into = self.into[clients] if self.sums.together else self.into
            release_(total, self.noises[clients], self.terms.scales.of_rows(clients), into)
            if not self.sums.together:
                self.use(clients, into)

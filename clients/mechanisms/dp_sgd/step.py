"""A step of DP-SGD of the clients of a block: Abadi et al. 2016, Algorithm 1.

draw        a lot of each client, by the sampling that is charged (before: `training.block`)
gradient    g_i of each example i of the lot
clip        g_i · min(1, C / ‖g_i‖), in each group of parameters; a factor of each g_i, not a copy
sum         S = Σ_i of them over the grid's length σ / 2²⁴, with σ = z C
noise       rint(S) + Z, with Z rounded normals of deviation 2²⁴: that is σ
divide      by the public expected lot L, and times the grid's length
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.per_example import ClipBounds, PerExampleGradients, Tile
from fedsim.clients.mechanisms.dp_sgd.lot_sums import LotSums
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.noise.release import Scales, release_
from fedsim.noise.sources import NoiseSource


class PrivateStep:
    """The steps of K clients that train together, each by its own mechanism.

    Guarantee: what a client releases in a step is its mechanism's `event`, a function of its own
    lot, its values and its noise, to the last bit.

    Attributes:
        adapts: whether a client's bound is learnt from the counts of its lots.

    Args:
        gradients: of the model.
        mechanisms: of each client; None: the client is absent.
        rows: R of the tiles that lots are cut into.
        divides: whether a release is divided by the expected lot; else it is the integers.
    """

    def __init__(
        self,
        gradients: PerExampleGradients,
        mechanisms: Sequence[DpSgdMechanism | None],
        rows: int,
        *,
        divides: bool = True,
    ) -> None:
        self._gradients, self._parameters = gradients, gradients.parameters
        self._rows, self._divides = rows, divides
        roundings = [None if one is None else one.rounding for one in mechanisms]
        self._sums = LotSums(gradients, roundings, rows)
        self.use(mechanisms)

    def use(self, mechanisms: Sequence[DpSgdMechanism | None]) -> None:
        """Take the next step by these mechanisms."""
        present = [one for one in mechanisms if one is not None]
        groups = [None if one is None else one.groups(self._parameters) for one in mechanisms]
        first = next(own for own in groups if own is not None)
        grid_lengths = [
            (1.0,) * len(first.bounds) if one is None or own is None else one.grid_steps(own)
            for one, own in zip(mechanisms, groups, strict=True)
        ]
        lots = [[0.0] if one is None else [1.0 / one.expected_lot] for one in mechanisms]
        units, bounds, shares = (
            torch.tensor(table, dtype=torch.float64, device=self._parameters.data.device)
            for table in (grid_lengths, [(own or first).bounds for own in groups], lots)
        )
        scales = self._by_row(units.reciprocal())
        self._clip = ClipBounds(present[0].clipping, first.members, self._by_row(bounds), scales)
        divided = units * shares if self._divides else torch.ones_like(units)
        places = self._parameters.group_slices(first.members)
        self._release_scales: Scales = [(place, divided[:, m : m + 1]) for place, m in places]
        self.adapts = any(one.clipping.count_noises for one in present)

    def take(
        self,
        values: Tensor,
        tiles: Iterator[Tile],
        sizes: Sequence[int],
        noises: Sequence[NoiseSource | None],
        into: Tensor,
    ) -> np.ndarray:
        """Overwrite `into` (K, size) with the releases of a step.

        Args:
            values: each client's flat parameters (K, size).
            tiles: of the clients' lots.
            sizes: examples of each lot.
            noises: of each client; None: none is added.
            into: the releases.

        Returns:
            How many examples of each client are within the bound of each group (K, m), for a bound
            that adapts; else zeros.
        """
        within = np.zeros((len(sizes), len(self._clip.members)), dtype=np.int64)
        self._sums.begin(sizes)
        for tile in tiles:
            weights = tile.example_weights.unsqueeze(1)  # 0: the row is no example
            clip = replace(self._clip, scales=self._clip.scales * weights)
            rows = self._gradients.clipped(values, tile, clip)
            if self.adapts:
                near = (rows.norms <= clip.bounds) & (weights > 0)
                within += near.view(len(sizes), self._rows, -1).sum(1).cpu().numpy()
            self._release(self._sums.add(rows), noises, into)
        self._release(self._sums.end(), noises, into)
        return within

    def _release(
        self,
        sums: Iterator[tuple[slice, Tensor]],
        noises: Sequence[NoiseSource | None],
        into: Tensor,
    ) -> None:
        """Add noise to the sums of whole lots, and divide by the expected lot."""
        for clients, total in sums:
            scales = [(place, own[clients]) for place, own in self._release_scales]
            release_(total, noises[clients], scales, into[clients])

    def _by_row(self, values: Tensor) -> Tensor:
        """Return values of clients (K, m) for each row of a tile (K · R, m)."""
        return values.repeat_interleave(self._rows, 0, output_size=len(values) * self._rows)

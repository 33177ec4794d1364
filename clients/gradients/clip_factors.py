"""By how much each example of a tile is scaled, and what happened to the examples of a lot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.clients.clipping.clipping import Clipping, Groups


@dataclass(frozen=True)
class LotStatistics:
    """What happened to the examples of a lot. Private: to be noised before it goes anywhere.

    Attributes:
        examples: number of examples.
        not_finite: how many contributed zero because their gradient was not finite.
        within: how many had a norm within the bound, by group (m,).
    """

    examples: int
    not_finite: int
    within: tuple[int, ...]

    def __add__(self, other: "LotStatistics") -> "LotStatistics":
        """Return the statistics of two parts of a lot together."""
        within = tuple(a + b for a, b in zip(self.within, other.within, strict=True))
        return LotStatistics(
            self.examples + other.examples, self.not_finite + other.not_finite, within
        )


@dataclass(frozen=True)
class ClipBounds:
    """How the rows of a tile are clipped.

    Attributes:
        clipping: the rule, the same for all clients up to its bounds.
        members: parameter indices of each group.
        bounds: C_m of each row's client, float64 (n, m); or (1, m) where all have one client.
        scales: factor of each row's clipped gradient in each group, float64 (n, m) or (n, 1); 0
            for a row that is no example.
    """

    clipping: Clipping
    members: Sequence[Sequence[int]]
    bounds: Tensor
    scales: Tensor

    @classmethod
    def of_client(cls, clipping: Clipping, groups: Groups, scales: Tensor) -> Self:
        """Return the bounds of rows of one client.

        Args:
            clipping: the rule.
            groups: of the model.
            scales: factor of each row's clipped gradient, float64 (n, m) or (n, 1).
        """
        return cls(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)


def clip_rows(norms: Tensor, clip: ClipBounds) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the factor of each row in each group, and the rows (n,) to be dropped.

    Args:
        norms: by group, float64 (n, m); changed in place: those of dropped rows become NaN.
        clip: bounds and scales.

    Guarantee: a row that is not finite in one group has factor 0 in all of them; a row's factors
    depend on that row alone.
    """
    dropped = None
    # The largest of numbers with NaN is NaN, which is not finite either. A device is not asked: an
    # answer would take longer than to drop rows that are zero anyway.
    if norms.is_cuda or not math.isfinite(norms.max().item()):
        dropped = ~norms.isfinite().all(1)
        norms.masked_fill_(dropped.unsqueeze(1), torch.nan)
    factors = clip.clipping.clip_factors(norms, clip.bounds) * clip.scales
    if dropped is not None:
        factors = factors.masked_fill(dropped.unsqueeze(1), 0.0)
    return factors.unbind(1), dropped


def group_norms(
    squared_norms: Mapping[int, Tensor],
    rows: int,
    members: Sequence[Sequence[int]],
    like: Tensor,
) -> Tensor:
    """Return the norms by group, float64 (n, m).

    Args:
        squared_norms: by parameter index, float64 (n,); unused parameters may be absent.
        rows: n.
        members: parameter indices of each group.
        like: a parameter, for the device.
    """
    columns = []
    for group in members:
        found = [squared_norms[i] for i in group if i in squared_norms]
        total = like.new_zeros(rows, dtype=torch.float64)
        columns.append(sum(found[1:], found[0]) if found else total)
    norms = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0].unsqueeze(1)
    return norms.sqrt()

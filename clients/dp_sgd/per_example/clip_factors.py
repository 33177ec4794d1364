"""By how much each example of a lot is scaled, and what happened to the examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.clipping import Clipping, Groups


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
class LotFactors:
    """What the examples of a lot are scaled by.

    Attributes:
        columns: for each group, the examples' factors (n,) in the parameters' type.
        dropped: marks the examples (n,) whose gradient is not finite; None if there are none.
        statistics: what happened to the examples.
    """

    columns: tuple[Tensor, ...]
    dropped: Tensor | None
    statistics: LotStatistics


def lot_factors(
    squared_norms: Mapping[int, Tensor],
    examples: int,
    clipping: Clipping,
    groups: Groups,
    *,
    scale: float,
    like: Tensor,
) -> LotFactors:
    """Return the factors of a lot.

    Args:
        squared_norms: by parameter index, float64 (n,); unused parameters may be absent.
        examples: n ≥ 1.
        clipping: the bounds' rule.
        groups: of the parameters.
        scale: of all factors.
        like: a parameter: what its type cannot hold is not finite.

    Guarantee: an example that is not finite in one group has factor 0 in all of them; a factor is
    never rounded up beyond the room that clipping leaves.
    """
    norms = lot_norms(squared_norms, examples, groups.members, like)
    bounds = _bounds(groups.bounds, norms.device)
    columns, dropped = row_factors(norms, clipping, bounds, scale=scale, like=like)
    # For so few numbers numpy takes a third of the time.
    within = (norms.cpu().numpy() <= groups.bounds).sum(0).tolist()
    refused = 0 if dropped is None else int(dropped.sum())
    return LotFactors(columns, dropped, LotStatistics(examples, refused, tuple(within)))


def row_factors(
    norms: Tensor, clipping: Clipping, bounds: Tensor, *, scale: float | Tensor, like: Tensor
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return what each example is scaled by in each group, and the examples (n,) to be dropped.

    Args:
        norms: (n, m), float64; those of dropped examples become NaN.
        clipping: the bounds' rule.
        bounds: (m,), or one row for each example (n, m).
        scale: of all factors, or of each example (n, 1).
        like: a parameter: what its type cannot hold is not finite.

    Guarantee: as of `lot_factors`; a row's factors depend on that row alone.
    """
    limit, dropped = torch.finfo(like.dtype).max, None
    # The largest of numbers with NaN is NaN, which is not within the limit either.
    if not norms.max().item() <= limit:
        dropped = ~(norms <= limit).all(1)
        norms.masked_fill_(dropped.unsqueeze(1), torch.nan)
    factors = clipping.clip_factors(norms, bounds)
    if isinstance(scale, Tensor) or scale != 1.0:
        factors = factors * scale
    if dropped is not None:
        factors = factors.masked_fill(dropped.unsqueeze(1), 0.0)
    return _rounded(factors, like.dtype).unbind(1), dropped


@lru_cache(maxsize=64)
def _bounds(bounds: tuple[float, ...], device: torch.device) -> Tensor:
    """Return bounds as a tensor, which nobody may change."""
    return torch.tensor(bounds, dtype=torch.float64, device=device)


def lot_norms(
    squared_norms: Mapping[int, Tensor],
    examples: int,
    members: Sequence[Sequence[int]],
    like: Tensor,
) -> Tensor:
    """Return the norms by group, float64 (n, m)."""
    columns = []
    for group in members:
        found = [squared_norms[i] for i in group if i in squared_norms]
        if not found:
            columns.append(like.new_zeros(examples, dtype=torch.float64))
            continue
        total = found[0]
        for value in found[1:]:
            total = total + value
        columns.append(total)
    norms = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0].unsqueeze(1)
    return norms.sqrt()


def _rounded(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return factors in the type of the gradients.

    Below the type's normal range a factor has too few digits to hold a bound, so it becomes 0.
    """
    if dtype == torch.float64:
        return factors
    information = torch.finfo(dtype)
    if information.eps > 1e-6:  # clipping leaves room for rounding to float32, not to shorter types
        factors = factors * (1.0 - information.eps)
    return torch.threshold(factors, information.tiny, 0.0).to(dtype)

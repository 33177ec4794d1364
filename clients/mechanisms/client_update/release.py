"""Clipped updates as integers of the grid, with or without the clients' own noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.mechanisms.client_update.mechanism import COUNT_SENSITIVITY, UpdateMechanism
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class ReleasedUpdates:
    """What leaves some clients, on their grids.

    Attributes:
        steps: the updates in steps of the grid, whole numbers in float64 (K, size).
        counts: the centred bit of each in steps of its grid; None where the bound is fixed.
    """

    steps: Tensor
    counts: Sequence[float | None]


def clipped_updates(updates: Tensor, bounds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return updates of norm at most their bound in units of `length`, and which were within.

    Guarantee: a row of the result has an L2 norm of at most (1 + (d + 32) 2⁻⁵³) · bound / length,
    and depends on its own row alone. An update with a value that is not finite is 0.

    Args:
        updates: float64 (K, d).
        bounds: S of each, float64 (K,).
        lengths: of a step of each one's grid, float64 (K,).
    """
    largest = updates.abs().amax(1)
    finite = largest.isfinite()
    updates = updates.masked_fill(~finite.unsqueeze(1), 0.0)
    # Divided by its largest value, so that no square over- or underflows.
    largest = torch.where(finite & (largest > 0.0), largest, 1.0)
    norms = largest * (updates / largest.unsqueeze(1)).square_().sum(1).sqrt()
    within = norms <= bounds
    factors = torch.where(within, 1.0, bounds / norms) / lengths
    return updates * factors.unsqueeze(1), within & finite


def release_updates(
    trained: Tensor,
    starts: Tensor,
    mechanisms: Sequence[UpdateMechanism],
    noises: Sequence[NoiseSource],
    has_data: Sequence[bool],
) -> ReleasedUpdates:
    """Return the releases of a round.

    Guarantee: with noise, a client's result is a function of whole numbers of its grid: the rounded
    clipped update and bit, limited to ±2⁵¹, plus the draws of its source. A client without data
    adds 0 to all of them, as zero-out adjacency says.

    Args:
        trained: trained values (K, size).
        starts: values that training began with (K, size).
        mechanisms: bound and grid of each client.
        noises: each client's own, or zeros where another party adds it.
        has_data: whether each client has any example.
    """
    updates = trained.double() - starts.double()
    bounds = updates.new_tensor([one.max_update_norm for one in mechanisms])
    lengths = updates.new_tensor([one.update_step for one in mechanisms])
    clipped, within = clipped_updates(updates, bounds, lengths)
    learns = mechanisms[0].count_noise is not None
    if learns:
        bits = [
            (COUNT_SENSITIVITY if inside else -COUNT_SENSITIVITY) * has / one.count_step
            for inside, has, one in zip(within.tolist(), has_data, mechanisms, strict=True)
        ]
        clipped = torch.cat([clipped, clipped.new_tensor(bits).unsqueeze(1)], 1)
    sources = [
        noise if one.noise_multiplier else None
        for noise, one in zip(noises, mechanisms, strict=True)
    ]
    whole = slice(0, clipped.shape[1])
    release_(clipped, sources, [(whole, clipped.new_ones(len(clipped), 1))], clipped)
    if not learns:
        return ReleasedUpdates(clipped, [None] * len(clipped))
    return ReleasedUpdates(clipped[:, :-1], clipped[:, -1].tolist())

"""Clipped updates as integers of the grid, with or without the client's own noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.updates.mechanism import COUNT_SENSITIVITY, UpdateMechanism
from fedsim.noise.release import release_
from fedsim.noise.sources import NoiseSource


@dataclass(frozen=True)
class ReleasedUpdate:
    """What leaves a client, on the grid.

    Attributes:
        steps: the update in steps of the grid, whole numbers in float64 (size,).
        count: the centred bit in steps of its grid; None where the bound is fixed.
    """

    steps: Tensor
    count: float | None


def clipped_update(update: Tensor, bound: float, length: float) -> tuple[Tensor, bool]:
    """Return an update of norm at most `bound` in units of `length`, and whether it was within.

    Guarantee: the result has an L2 norm of at most (1 + (d + 32) 2⁻⁵³) · bound / length. An update
    with a value that is not finite is 0.

    Args:
        update: float64 (d,).
        bound: S.
        length: of a step of the grid.
    """
    largest = float(update.abs().max()) if len(update) else 0.0
    if largest == 0.0 or not bool(update.isfinite().all()):
        return torch.zeros_like(update), largest == 0.0
    scaled = update / largest  # no square over- or underflows
    norm = largest * float(scaled.square_().sum().sqrt())
    within = norm <= bound
    return update * ((1.0 if within else bound / norm) / length), within


def release_update(
    trained: Tensor,
    start: Tensor,
    mechanism: UpdateMechanism,
    noise: NoiseSource,
    *,
    has_data: bool = True,
) -> ReleasedUpdate:
    """Return the release of a round.

    Guarantee: with noise, the result is a function of whole numbers of the grid: the rounded
    clipped update and bit, limited to ±2⁵¹, plus the draws of the source. A client without data
    adds 0 to all of them, as zero-out adjacency says.

    Args:
        trained: trained values (size,).
        start: values of the global model (size,).
        mechanism: bound and grid.
        noise: the client's own, or zeros where another party adds it.
        has_data: whether the client has any example.
    """
    update, within = clipped_update(
        trained.double() - start.double(), mechanism.max_update_norm, mechanism.update_step
    )
    parts = [update]
    if mechanism.count_noise is not None:
        bit = (COUNT_SENSITIVITY if within else -COUNT_SENSITIVITY) * has_data
        parts.append(update.new_tensor([bit / mechanism.count_step]))
    row = torch.cat(parts).unsqueeze(0)
    sources: Sequence[NoiseSource | None] = [noise if mechanism.noise_multiplier else None]
    one = row.new_ones(1, 1)
    release_(row, sources, [(slice(0, row.shape[1]), one)], row)
    count = None if mechanism.count_noise is None else float(row[0, -1])
    return ReleasedUpdate(row[0, : len(update)], count)

"""Release of clipped sums: they are rounded to integers, get integer noise, and are scaled.

After the noise is added, every operation is a function of the released integers. So the scale, the
floating-point type and the rounding of the result reveal nothing more about the data.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedsim.noise import fused
from fedsim.noise.grid import SATURATION
from fedsim.noise.sources import NoiseSource, fill_rows_, keystreams_of

Scales = Sequence[tuple[slice, Tensor]]
"""Pairs (slice of the values, grid step in each row (rows, 1)); the slices cover all values."""


def release_(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales, into: Tensor
) -> None:
    """Write noisy sums, (rint(sums) + noise) · scale, into a tensor.

    Guarantee: a row with noise is a function of integers: its rounded sums, limited to ±2⁵¹, plus
    the draws of its noise source. A row without a noise source is sums · scale and has no privacy.

    Args:
        sums: sums (K, size), float32 or float64, in grid steps (2⁻²⁴ standard deviations of the
            noise); overwritten.
        noises: noise source of each row; None for a row without noise.
        scales: pairs (slice of the values, length of a grid step for each row).
        into: the result (K, size), of any floating-point type.
    """
    compiled = _kernel_for(sums, into)
    scales = [(place, lengths.expand(sums.shape[0], 1)) for place, lengths in scales]
    for rows in _row_blocks(noises, sums.shape[1]):
        streams = keystreams_of(noises[rows]) if compiled is not None else None
        block = [(place, lengths[rows]) for place, lengths in scales]
        if compiled is not None and streams is not None:
            fused.release_rows(compiled, streams, sums[rows], block, into[rows])
        else:
            _release_block(sums[rows], noises[rows], block, into[rows])


def _kernel_for(sums: Tensor, into: Tensor) -> fused.Kernel | None:
    """Return the compiled loop; None where it cannot be used or would not save time."""
    if into is sums or sums.device.type != "cpu" or into.dtype not in _COMPILED_TYPES:
        return None
    lie_in_rows = sums.is_contiguous() and into.is_contiguous()
    return _DEMAND.kernel(sums.numel()) if lie_in_rows else None


_DEMAND = fused.Demand()
_COMPILED_TYPES = (torch.float32, torch.float64)


def _release_block(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales, into: Tensor
) -> None:
    """Release rows of which either all or none have a noise source."""
    sources = [noise for noise in noises if noise is not None]
    for start in range(0, sums.shape[1], _BLOCK_VALUES):
        stop = min(start + _BLOCK_VALUES, sums.shape[1])
        block = sums[:, start:stop]
        if sources:
            block = _noisy(block, sources)
        for place, lengths in scales:
            part = slice(max(start, place.start), min(stop, place.stop))
            if part.start < part.stop:
                values = block[:, part.start - start : part.stop - start]
                torch.mul(values, lengths, out=into[:, part])  # in float64, the type of lengths


def _noisy(block: Tensor, sources: Sequence[NoiseSource]) -> Tensor:
    """Return the rounded sums plus the noise of each row, as whole numbers in float64."""
    drawn = block.new_empty(block.shape, dtype=torch.float64)
    fill_rows_(sources, drawn)
    return drawn.add_(block.round_().clamp_(-SATURATION, SATURATION))


def _row_blocks(noises: Sequence[NoiseSource | None], width: int) -> Iterator[slice]:
    """Yield slices of successive rows that all have noise, or all have none."""
    most, start = max(1, _BLOCK_VALUES // max(1, width)), 0
    for row in range(1, len(noises) + 1):
        whole = row == len(noises) or row - start == most
        if whole or (noises[row] is None) != (noises[start] is None):
            yield slice(start, row)
            start = row


_BLOCK_VALUES = 1 << 17

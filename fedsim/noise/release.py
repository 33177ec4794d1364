"""Release of clipped sums on the grid: rounded, with integer noise, and scaled last.

After the noise is added, every operation is a function of the released integers: the scale, the
type of the result and its rounding cannot tell anything more.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedsim.noise import fused
from fedsim.noise.grid import SATURATION
from fedsim.noise.sources import NoiseSource, fill_rows_, keystreams_of

Scales = Sequence[tuple[slice, Tensor]]
"""For each slice of the values, the length of a step of the grid for each row (K, 1)."""


def release_(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales, into: Tensor
) -> None:
    """Overwrite `into` with (rint(sums) + noise) · scale.

    Guarantee: a row with noise is a function of integers: its rounded sums, limited to ±2⁵¹, plus
    the draws of its source. A row without a source is its sums · scale: it has no privacy.

    Args:
        sums: (K, size) float32 or float64, in steps of the grid; overwritten.
        noises: the source of each row; None: no noise.
        scales: of each slice; together all values.
        into: (K, size), of any floating-point type.
    """
    compiled = _kernels_for(sums, into)
    for rows in _row_blocks(noises, sums.shape[1]):
        streams = keystreams_of(noises[rows]) if compiled is not None else None
        own = [(place, lengths.expand(len(sums), 1)[rows]) for place, lengths in scales]
        if compiled is not None and streams is not None:
            by_row = [(place, lengths[:, 0].tolist()) for place, lengths in own]
            fused.release_rows(compiled, streams, sums[rows].numpy(), by_row, into[rows].numpy())
        else:
            _release_block(sums[rows], noises[rows], own, into[rows])


def _kernels_for(sums: Tensor, into: Tensor) -> fused.Kernels | None:
    """Return the compiled loops where they are worth their start and can be used."""
    if sums.shape[1] < _LONG_ROW or into is sums:
        return None
    lie_in_rows = sums.device.type == "cpu" and sums.stride(1) == into.stride(1) == 1
    if not lie_in_rows or into.dtype not in (torch.float32, torch.float64):
        return None
    return _DEMAND.kernels(sums.numel())


_LONG_ROW = 1 << 13  # shorter ones are faster together
_DEMAND = fused.Demand()


def _release_block(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales, into: Tensor
) -> None:
    """Release some rows; all have a source, or none has."""
    sources = [noise for noise in noises if noise is not None]
    for start in range(0, sums.shape[1], _BLOCK_VALUES):
        stop = min(start + _BLOCK_VALUES, sums.shape[1])
        block = sums[:, start:stop]
        if sources:
            block = _noisy(block, sources)
        for place, lengths in scales:
            part = slice(max(start, place.start), min(stop, place.stop))
            if part.start < part.stop:
                own = block[:, part.start - start : part.stop - start]
                torch.mul(own, lengths, out=into[:, part])  # in float64, as the lengths are


def _noisy(block: Tensor, sources: Sequence[NoiseSource]) -> Tensor:
    """Return the rounded sums plus each row's noise, whole numbers in float64."""
    drawn = block.new_empty(block.shape, dtype=torch.float64)
    fill_rows_(sources, drawn)
    return drawn.add_(block.round_().clamp_(-SATURATION, SATURATION))


def _row_blocks(noises: Sequence[NoiseSource | None], width: int) -> Iterator[slice]:
    """Yield slices of rows that make a block and all have noise, or all have none."""
    most, start = max(1, _BLOCK_VALUES // max(1, width)), 0
    for row in range(1, len(noises) + 1):
        whole = row == len(noises) or row - start == most
        if whole or (noises[row] is None) != (noises[start] is None):
            yield slice(start, row)
            start = row


_BLOCK_VALUES = 1 << 17

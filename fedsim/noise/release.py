"""Release of clipped sums on the grid: rounded, with integer noise, and scaled last.

After the noise is added, every operation is a function of the released integers: the scale, the
type of the result and its rounding cannot tell anything more.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedsim.noise import fused
from fedsim.noise.grid import SATURATION
from fedsim.noise.sources import (
    CHUNK_VALUES,
    KeystreamNoise,
    NoiseSource,
    fill_rows_,
    keystream_sources,
    words_of,
)

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
    size, compiled = sums.shape[1], _kernels_for(sums, into)
    for start in range(0, size, CHUNK_VALUES):
        stop = min(start + CHUNK_VALUES, size)
        parts = [
            (slice(max(start, place.start), min(stop, place.stop)), lengths)
            for place, lengths in scales
            if place.start < stop and start < place.stop
        ]
        for rows in _row_blocks(noises, stop - start):
            sources = keystream_sources(noises[rows])
            if compiled is not None and sources:
                own = [(part, lengths.expand(len(sums), 1)[rows]) for part, lengths in parts]
                _release_fused(compiled, sums[rows], sources, own, slice(start, stop), into[rows])
                continue
            block = sums[rows, start:stop].double()  # float64 itself, where it is that
            _add_noise_(block, noises[rows])
            for part, lengths in parts:
                own = block[:, part.start - start : part.stop - start]
                into[rows, part] = own.mul_(lengths[rows])


def _kernels_for(sums: Tensor, into: Tensor) -> fused.Kernels | None:
    """Return the compiled loops where they are worth their start and can be used."""
    if sums.shape[1] < _LONG_ROW or into is sums:
        return None
    lie_in_rows = sums.device.type == "cpu" and sums.stride(1) == into.stride(1) == 1
    if not lie_in_rows or into.dtype not in (torch.float32, torch.float64):
        return None
    return _DEMAND.kernels(sums.numel())


def _release_fused(
    compiled: fused.Kernels,
    sums: Tensor,
    sources: Sequence[KeystreamNoise],
    parts: Scales,
    columns: slice,
    into: Tensor,
) -> None:
    """Release some columns of rows that all draw from keystreams, one row after the other."""
    words, first = words_of(sources, columns.stop - columns.start), columns.start
    scales = [lengths[:, 0].tolist() for _, lengths in parts]
    for row, source in enumerate(sources):
        of_row = [
            (slice(place.start - first, place.stop - first), own[row])
            for (place, _), own in zip(parts, scales, strict=True)
        ]
        fused.release_row(
            compiled,
            words[row],
            source.keystreams()[1],
            sums[row, columns].numpy(),
            of_row,
            into[row, columns].numpy(),
        )


_LONG_ROW = 1 << 13  # shorter ones are faster together
_DEMAND = fused.Demand()


def _add_noise_(block: Tensor, noises: Sequence[NoiseSource | None]) -> None:
    """Round sums to the grid and add each row's noise; all rows have a source, or none has."""
    sources = [noise for noise in noises if noise is not None]
    if not sources:
        return
    drawn = block.new_empty(block.shape)
    fill_rows_(sources, drawn)
    block.round_().clamp_(-SATURATION, SATURATION).add_(drawn)


def _row_blocks(noises: Sequence[NoiseSource | None], width: int) -> Iterator[slice]:
    """Yield slices of rows that fit into a chunk together and all have noise, or all have none."""
    most, start = max(1, CHUNK_VALUES // width), 0
    for row in range(1, len(noises) + 1):
        whole = row == len(noises) or row - start == most
        if whole or (noises[row] is None) != (noises[start] is None):
            yield slice(start, row)
            start = row

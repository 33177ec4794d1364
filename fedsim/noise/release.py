"""Release of clipped sums on the grid: rounded, with integer noise, and scaled last.

After the noise is added, every operation is a function of the released integers: the scale, the
type of the result and its rounding cannot tell anything more.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from fedsim.noise.grid import SATURATION
from fedsim.noise.sources import CHUNK_VALUES, NoiseSource, fill_rows_

Scales = Sequence[tuple[slice, Tensor]]
"""For each slice of the values, the length of a step of the grid for each row (K, 1)."""


def release_(
    sums: Tensor, noises: Sequence[NoiseSource | None], scales: Scales, into: Tensor
) -> None:
    """Overwrite `into` with (rint(sums) + noise) · scale.

    Guarantee: a row with noise is a function of integers: its rounded sums, limited to ±2⁵¹, plus
    the draws of its source. A row without a source is its sums · scale: it has no privacy.

    Args:
        sums: (K, size) float64, in steps of the grid; overwritten.
        noises: the source of each row; None: no noise.
        scales: of each slice; together all values.
        into: (K, size), of any floating-point type.
    """
    size = sums.shape[1]
    for start in range(0, size, CHUNK_VALUES):
        stop = min(start + CHUNK_VALUES, size)
        parts = [
            (slice(max(start, place.start), min(stop, place.stop)), lengths)
            for place, lengths in scales
            if place.start < stop and start < place.stop
        ]
        for rows in _row_blocks(noises, stop - start):
            _add_noise_(sums[rows, start:stop], noises[rows])
            for part, lengths in parts:
                into[rows, part] = sums[rows, part].mul_(lengths[rows])


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

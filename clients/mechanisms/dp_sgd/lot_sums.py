"""Sums of the clipped gradients of lots, in float32 where its rounding is small (`SumRounding`)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedsim.clients.gradients.layers.base import Part
from fedsim.clients.gradients.per_example import ClippedRows, PerExampleGradients
from fedsim.noise.grid import SumRounding

_SMALL = 1 << 14  # values of a model; smaller models add up all clients in one call
_CACHED = 1 << 17  # values of the sums that a core's cache holds until they are released


class LotSums:
    """Adds up the lots of the clients of a block.

    Guarantee: the sum of a client is a function of its own rows and of the public shape of the
    block, to the last bit.

    Args:
        gradients: of the model.
        roundings: of each client's sums; None: the client is absent.
        rows: R of the tiles.
    """

    def __init__(
        self,
        gradients: PerExampleGradients,
        roundings: Sequence[SumRounding | None],
        rows: int,
    ) -> None:
        self._gradients = gradients
        data, clients = gradients.parameters.data, len(roundings)
        is_single = data.dtype == torch.float32 and products_are_exact(data.device)
        self._most = [
            min(one.rows, rows) if one is not None and is_single else 0 for one in roundings
        ]
        self._size = gradients.parameters.size
        self._together = data.is_cuda or self._size <= _SMALL
        group = clients if self._together else max(1, min(clients, _CACHED // self._size))
        self._cached = data.new_empty(group, self._size)
        self._places = [self._views(row) for row in self._cached.split(1)]
        self.begin([0] * clients)

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a step.

        Args:
            sizes: examples of each client's lot.
        """
        self._sizes, self._waits = sizes, True
        self._long = {
            k: torch.zeros(1, self._size, dtype=torch.float64, device=self._cached.device)
            for k, (size, most) in enumerate(zip(sizes, self._most, strict=True))
            if size > most
        }

    def add(self, rows: ClippedRows | None) -> Iterator[tuple[slice, Tensor]]:
        """Add a tile up, and yield the lots that end with it: clients and their sums (k, size).

        Sums are overwritten when the next ones are read.

        Args:
            rows: the clipped gradients of the tile; None: there was no tile.
        """
        for k, total in self._long.items():
            if rows is not None:
                rows.add_to(self._views(total), Part(k))
        if self._waits:  # the first tile has all short lots
            self._waits = False
            yield from self._short(rows)

    def end(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the other lots, as `add` does."""
        yield from self.add(None)
        for k, total in self._long.items():
            yield slice(k, k + 1), total

    def _short(self, rows: ClippedRows | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the lots of one tile, of a few clients at a time."""
        clients, most = len(self._sizes), len(self._cached)
        for start in range(0, clients, most):
            group = range(start, min(start + most, clients))
            short = [k for k in group if k not in self._long]
            sums = self._cached[: len(group)].zero_()
            if rows is not None and self._together and short:
                rows.add_to(self._views(sums))
            elif rows is not None:
                for k in short:
                    if self._sizes[k]:
                        rows.add_to(self._places[k - start], Part(k, slice(0, self._sizes[k])))
            for run in _neighbours(short):
                yield run, sums[run.start - start : run.stop - start]

    def _views(self, sums: Tensor) -> list[Tensor]:
        return self._gradients.parameters.stacked_views(sums)


def _neighbours(numbers: Sequence[int]) -> Iterator[slice]:
    """Yield ascending numbers as slices."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield slice(numbers[start], numbers[at - 1] + 1)
            start = at


def products_are_exact(device: torch.device) -> bool:
    """Whether products of float32 have its own precision: no TF32 and no bfloat16 inside."""
    mkldnn = torch.backends.mkldnn
    kinds = (torch.backends, mkldnn, getattr(mkldnn, "matmul", None))
    if device.type == "cuda":
        kinds = (*kinds, torch.backends.cuda.matmul)
    if any(getattr(kind, "fp32_precision", "none") not in ("none", "ieee") for kind in kinds):
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # both ways of setting it were used
        return False

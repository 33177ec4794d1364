"""Lots cut into tiles of a fixed, public shape.

A product's last bits depend on its number of rows. If that were the number of examples in a lot,
one example could change the contribution of all others, and the proof of DP-SGD, in which a
contribution depends on the parameters and on its own example alone, would not hold. So every pass
has K clients with R rows each, both public. The size of a lot decides only how many tiles there
are; rows without an example are zeros, and are clipped to nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.augmentation import Views
from fedsim.clients.gradients.model_randomness import ModelRandomness
from fedsim.clients.gradients.per_example import Tile

_MULTIPLE = 8  # of rows
_SMALL_BYTES = 1 << 23  # of all clients' examples: copying so many takes a thousandth of a second


def tile_rows(usual_lot: int, most: int | None = None) -> int:
    """Return R, the rows of a client in a tile: a multiple of 8, or 1.

    In products of other numbers of rows, libraries treat the last ones in another way: a row's last
    bits would depend on its place.

    Args:
        usual_lot: a public number of examples that few lots exceed.
        most: rows that fit into memory; None: any number.
    """
    eights = max(1, -(-usual_lot // _MULTIPLE))
    if most is None or eights * _MULTIPLE <= most:
        return eights * _MULTIPLE
    if most < _MULTIPLE:
        return 1
    tiles = -(-eights // (most // _MULTIPLE))
    return -(-eights // tiles) * _MULTIPLE


def padded_tiles(values: Tensor, rows: int) -> list[Tensor]:
    """Return rows (n, ...) as tiles (rows, ...), the last one filled up with zeros.

    Args:
        values: (n, ...), n at least 1.
        rows: of a tile.
    """
    parts = list(values.split(rows))
    missing = rows - len(parts[-1])
    if missing:
        parts[-1] = torch.cat([parts[-1], parts[-1].new_zeros(missing, *values.shape[1:])])
    return parts


class LotReader:
    """The lots of several clients as tiles.

    Args:
        data: features (n, ...) and targets (n, ...) of each client; None: the client is absent.
        rows: R.
        dtype: of the weights of rows.
        views: of each client's examples, the same number for all; None: the examples themselves.
        randomness: of the model, which learns whose rows a tile has.
    """

    def __init__(
        self,
        data: Sequence[tuple[Tensor, Tensor] | None],
        rows: int,
        *,
        dtype: torch.dtype,
        views: Sequence[Views | None] | None = None,
        randomness: ModelRandomness | None = None,
    ) -> None:
        self._data, self._rows, self._dtype, self._views = data, rows, dtype, views
        self.randomness = randomness
        present = [each for each in data if each is not None]
        size = sum(part.nbytes for each in present for part in each)
        self._like = present[0]
        self._buffers: tuple[Tensor, Tensor] | None = None  # used again for each tile
        self._pool = _Pool(data) if len(data) > 1 and size <= _SMALL_BYTES else None

    def tiles(self, lots: Sequence[np.ndarray | None], step: int = 0) -> Iterator[Tile]:
        """Yield the tiles of one lot of each client; None: the client has none.

        A tile is to be used up before the next one is asked for, which takes its memory.

        Args:
            lots: indices of each client's examples.
            step: number of the step in the round, for the views.
        """
        rows = self._rows
        longest = max((len(lot) for lot in lots if lot is not None), default=0)
        for at in range(0, longest, rows):
            parts = [lot[at : at + rows] if lot is not None else _EMPTY for lot in lots]
            yield self._tile(range(len(lots)), parts, step)

    def packed(
        self, lots: Sequence[np.ndarray | None], places: int, step: int = 0
    ) -> Iterator[tuple[Sequence[int], Tile]]:
        """Yield tiles, and the client of each place that is filled.

        Places are filled in order: by the first client's lot, then by the next one's. A client
        without a lot fills none. Places that stay empty in the last tile have padding rows.

        Args:
            lots: indices of each client's examples.
            places: of a tile, each with R rows.
            step: number of the step in the round, for the views.
        """
        filled = [
            (client, lot[at : at + self._rows])
            for client, lot in enumerate(lots)
            if lot is not None
            for at in range(0, len(lot), self._rows)
        ]
        for start in range(0, len(filled), places):
            clients, parts = map(list, zip(*filled[start : start + places], strict=True))
            missing = places - len(clients)
            padded = [*clients, *[0] * missing], [*parts, *[_EMPTY] * missing]
            yield clients, self._tile(*padded, step)

    def _tile(self, clients: Sequence[int], parts: Sequence[np.ndarray], step: int) -> Tile:
        """Return the tile with a part of a client's lot in each place."""
        features, targets = self._gather(clients, parts)
        lengths = np.array([len(part) for part in parts])
        real = np.arange(self._rows) < lengths[:, None]
        weights = torch.from_numpy(real.reshape(-1)).to(self._dtype).to(features.device)
        tile = Tile(len(parts), features, targets, weights)
        if self._views is not None:
            tile = self._viewed(tile, parts, [self._views[client] for client in clients], step)
        if self.randomness is not None:
            self.randomness.begin(
                parts, rows=self._rows, views=tile.views, step=step, clients=clients
            )
            tile = replace(tile, randomness=self.randomness)
        return tile

    def _viewed(
        self, tile: Tile, parts: Sequence[np.ndarray], views: Sequence[Views | None], step: int
    ) -> Tile:
        """Return a tile with the views of each example in its place, side by side."""
        number = next(each.number for each in views if each is not None)
        features = tile.features.repeat_interleave(number, 0)
        for k, (own, part) in enumerate(zip(views, parts, strict=True)):
            if own is not None and len(part):
                start = k * self._rows
                drawn = own.draw(tile.features[start : start + len(part)], part, step)
                features[start * number : start * number + len(drawn)] = drawn
        targets = tile.targets.repeat_interleave(number, 0)
        weights = tile.weights.repeat_interleave(number, 0)
        return Tile(tile.clients, features, targets, weights, number)

    def _gather(self, clients: Sequence[int], parts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        if self._pool is not None:
            return self._pool.gather(clients, parts, self._rows)
        if self._buffers is None:
            n = len(parts) * self._rows
            x, y = (like.new_zeros(n, *like.shape[1:]) for like in self._like)
            self._buffers = x, y
        for k, (client, part) in enumerate(zip(clients, parts, strict=True)):
            own = self._data[client]
            start, stop = k * self._rows, (k + 1) * self._rows
            filled = start + len(part)
            for place, buffer in enumerate(self._buffers):
                if own is not None and len(part):
                    index = torch.from_numpy(part).to(buffer.device)
                    torch.index_select(own[place], 0, index, out=buffer[start:filled])
                if filled < stop:
                    buffer[filled:stop].zero_()
        return self._buffers


class _Pool:
    """All clients' examples in one tensor, for one call in place of one for each client."""

    def __init__(self, data: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        present = [each for each in data if each is not None]
        self._x, self._y = (
            torch.cat([part.new_zeros(1, *part.shape[1:]) for part in parts[:1]] + list(parts))
            for parts in zip(*present, strict=True)
        )
        sizes = [0 if each is None else len(each[0]) for each in data]
        self._starts = 1 + np.cumsum([0, *sizes[:-1]])  # behind a row of zeros

    def gather(
        self, clients: Sequence[int], parts: Sequence[np.ndarray], rows: int
    ) -> tuple[Tensor, Tensor]:
        index = np.zeros((len(parts), rows), dtype=np.int64)
        for k, (client, part) in enumerate(zip(clients, parts, strict=True)):
            index[k, : len(part)] = part + self._starts[client]
        places = torch.from_numpy(index.reshape(-1)).to(self._x.device)
        return self._x.index_select(0, places), self._y.index_select(0, places)


_EMPTY = np.empty(0, dtype=np.int64)

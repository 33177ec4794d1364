"""Padded batches: a client's batch cut into pieces of a fixed, public number of rows.

The last bits of a matrix product depend on its number of rows. If this were the private number of
examples in a batch, one example could change the contributions of all others. The proof of DP-SGD,
in which a contribution depends on the parameters and its example alone, would not hold. So every
pass has K clients with R rows each, both public. The size of a batch decides only the number of
padded batches. Rows without an example are zeros and contribute nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.example_randomness import ModelRandomness, Views
from fedsim.clients.gradients.layers.base import ROW_MULTIPLE
from fedsim.clients.gradients.per_example import PaddedBatch

_SMALL_BYTES = 1 << 21  # of all clients' examples, which take 0.1 ms to copy


def padded_rows(usual_batch: int, most: int | None = None) -> int:
    """Return the number of rows R that each client has in a padded batch.

    It is a multiple of `ROW_MULTIPLE`, or 1.

    Args:
        usual_batch: a public number of examples that few batches exceed.
        most: largest physical batch, in rows; None for no limit.
    """
    eights = max(1, -(-usual_batch // ROW_MULTIPLE))
    if most is None or eights * ROW_MULTIPLE <= most:
        return eights * ROW_MULTIPLE
    if most < ROW_MULTIPLE:
        return 1
    padded_batches = -(-eights // (most // ROW_MULTIPLE))
    return -(-eights // padded_batches) * ROW_MULTIPLE


def padded_parts(values: Tensor, rows: int) -> list[Tensor]:
    """Split a tensor (n, ...) into tensors (rows, ...), the last one filled up with zero rows.

    Args:
        values: the tensor (n, ...), with n at least 1.
        rows: number of rows of each returned tensor.
    """
    # Contiguous, as padding is: the last bits of a norm depend on how a row lies in memory.
    if values.shape[0] == rows:
        return [values.contiguous()]
    parts = [part.contiguous() for part in values.split(rows)]
    missing = rows - len(parts[-1])
    if missing:
        parts[-1] = torch.cat([parts[-1], parts[-1].new_zeros(missing, *values.shape[1:])])
    return parts


class BatchReader:
    """Reader that cuts the batches of several clients into padded batches.

    Args:
        data: features (n, ...) and targets (n, ...) of each client; an entry is None where the
            client is absent.
        rows: number of rows R of each client in a padded batch.
        dtype: type of the weights of the rows' losses.
        views: source of random augmented views for each client, all with the same number of views;
            None where examples have no views.
        randomness: source of the model's random numbers, which is told the examples of each padded
            batch; None where the model draws none.
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
        present = [tensors for tensors in data if tensors is not None]
        size = sum(part.nbytes for tensors in present for part in tensors)
        self._like = present[0]
        self._buffers: tuple[Tensor, Tensor] | None = None  # used again for each padded batch
        self._pool = _Pool(data) if len(data) > 1 and size <= _SMALL_BYTES else None

    def padded_batches(
        self, batches: Sequence[np.ndarray | None], step: int = 0
    ) -> Iterator[PaddedBatch]:
        """Yield padded batches with R rows of each client; together they hold all given batches.

        Each padded batch overwrites the memory of the previous one.

        Args:
            batches: indices of the examples in each client's batch; an entry is None where the
                client has no batch.
            step: number of the step in the round, for the augmented views.
        """
        rows = self._rows
        longest = max((len(batch) for batch in batches if batch is not None), default=0)
        for at in range(0, longest, rows):
            parts = [batch[at : at + rows] if batch is not None else _EMPTY for batch in batches]
            yield self._padded(range(len(batches)), parts, step)

    def packed(
        self, batches: Sequence[np.ndarray | None], places: int, step: int = 0
    ) -> Iterator[tuple[Sequence[int], PaddedBatch]]:
        """Yield pairs (clients, padded batch) that together hold the batches of all clients.

        A padded batch consists of slots of R rows each, and a slot holds examples of one client.
        Clients fill slots in ascending order, each as many as its batch needs, so only the last
        padded batch may have empty slots. `clients` has the index of the client in each filled
        slot.

        Args:
            batches: indices of the examples in each client's batch; an entry is None where the
                client has no batch.
            places: number of slots of a padded batch.
            step: number of the step in the round, which determines the random augmentations.
        """
        filled = [
            (client, batch[at : at + self._rows])
            for client, batch in enumerate(batches)
            if batch is not None
            for at in range(0, len(batch), self._rows)
        ]
        for start in range(0, len(filled), places):
            clients, parts = map(list, zip(*filled[start : start + places], strict=True))
            missing = places - len(clients)
            padded = [*clients, *[0] * missing], [*parts, *[_EMPTY] * missing]
            yield clients, self._padded(*padded, step)

    def _padded(
        self, clients: Sequence[int], parts: Sequence[np.ndarray], step: int
    ) -> PaddedBatch:
        """Return the padded batch with a part of a client's batch in each place."""
        features, targets = self._gather(clients, parts)
        lengths = np.array([len(part) for part in parts])
        real = np.arange(self._rows) < lengths[:, None]
        weights = torch.from_numpy(real.reshape(-1)).to(self._dtype).to(features.device)
        padded = PaddedBatch(len(parts), features, targets, weights)
        if self._views is not None:
            padded = self._viewed(padded, parts, [self._views[client] for client in clients], step)
        if self.randomness is not None:
            self.randomness.begin(
                parts, rows=self._rows, views=padded.views, step=step, clients=clients
            )
            padded = replace(padded, randomness=self.randomness)
        return padded

    def _viewed(
        self,
        padded: PaddedBatch,
        parts: Sequence[np.ndarray],
        views: Sequence[Views | None],
        step: int,
    ) -> PaddedBatch:
        """Return a padded batch with the views of each example in successive rows."""
        number = next(source.number for source in views if source is not None)
        features = padded.features.repeat_interleave(number, 0)
        for k, (source, part) in enumerate(zip(views, parts, strict=True)):
            if source is not None and len(part):
                start = k * self._rows
                drawn = source.draw(padded.features[start : start + len(part)], part, step)
                features[start * number : start * number + len(drawn)] = drawn
        targets = padded.targets.repeat_interleave(number, 0)
        weights = padded.weights.repeat_interleave(number, 0)
        return PaddedBatch(padded.clients, features, targets, weights, number)

    def _gather(self, clients: Sequence[int], parts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        if self._pool is not None:
            return self._pool.gather(clients, parts, self._rows)
        if self._buffers is None:
            n = len(parts) * self._rows
            x, y = (like.new_zeros(n, *like.shape[1:]) for like in self._like)
            self._buffers = x, y
        for k, (client, part) in enumerate(zip(clients, parts, strict=True)):
            tensors = self._data[client]
            start, stop = k * self._rows, (k + 1) * self._rows
            filled = start + len(part)
            for place, buffer in enumerate(self._buffers):
                if tensors is not None and len(part):
                    index = torch.from_numpy(part).to(buffer.device)
                    torch.index_select(tensors[place], 0, index, out=buffer[start:filled])
                if filled < stop:
                    buffer[filled:stop].zero_()
        return self._buffers


class _Pool:
    """All clients' examples in one tensor, so that one call gathers the rows of all clients."""

    def __init__(self, data: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        present = [tensors for tensors in data if tensors is not None]
        self._x, self._y = (
            torch.cat([part.new_zeros(1, *part.shape[1:]) for part in parts[:1]] + list(parts))
            for parts in zip(*present, strict=True)
        )
        sizes = [0 if tensors is None else len(tensors[0]) for tensors in data]
        self._starts = 1 + np.cumsum([0, *sizes[:-1]])  # row 0 is the zeros of padding rows

    def gather(
        self, clients: Sequence[int], parts: Sequence[np.ndarray], rows: int
    ) -> tuple[Tensor, Tensor]:
        index = np.zeros((len(parts), rows), dtype=np.int64)
        for k, (client, part) in enumerate(zip(clients, parts, strict=True)):
            index[k, : len(part)] = part + self._starts[client]
        places = torch.from_numpy(index.reshape(-1)).to(self._x.device)
        return self._x.index_select(0, places), self._y.index_select(0, places)


_EMPTY = np.empty(0, dtype=np.int64)

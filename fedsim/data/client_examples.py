"""The examples of each client, gathered when it trains.

Memory holds one dataset and the row numbers of each client, for any number of clients. A dataset on
disk (`numpy.load(..., mmap_mode="r")`) stays there until a client trains.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from fedsim.data.examples import Examples, ExampleTransform

Rows = NDArray[np.int64] | slice


class ClientExamples(Sequence[Examples]):
    """Every client's examples by client number, gathered on each access.

    Args:
        source: a dataset that contains the examples of all clients in `rows`.
        rows: rows of `source` that belong to each client of this process.
        num_clients: number of clients of the federation; None: `rows` has all of them.
        transform: applied to the features of a dataset on disk on each access.
    """

    def __init__(
        self,
        source: Examples,
        rows: Mapping[int, Rows],
        *,
        num_clients: int | None = None,
        transform: ExampleTransform | None = None,
    ) -> None:
        self._source = source
        self._rows = dict(rows)
        self._transform = transform
        self._num_clients = len(rows) if num_clients is None else num_clients

    @property
    def is_in_memory(self) -> bool:
        """Whether the examples are in memory, not in a memory-mapped file."""
        return self._source.is_in_memory

    @property
    def is_transformed_on_access(self) -> bool:
        """Whether each access to a client's examples transforms them anew."""
        return self._transform is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the features and targets of this process's clients."""
        row_bytes = [array[:1].nbytes for array in (self._source.features, self._source.targets)]
        return sum(self.sizes) * sum(row_bytes)

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each client of this process, by client number."""
        return [self.size(client) for client in sorted(self._rows)]

    def size(self, client: int) -> int:
        """Return the number of examples of a client of this process."""
        rows = self._rows[client]
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def targets(self, client: int) -> NDArray[np.generic]:
        """Return the targets of a client of this process, without its features."""
        return self._source.targets[self._rows[client]]

    def __len__(self) -> int:
        return self._num_clients

    @overload
    def __getitem__(self, index: int) -> Examples: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Examples]: ...
    def __getitem__(self, index: int | slice) -> Examples | Sequence[Examples]:
        """Return a client's examples.

        Raises:
            IndexError: no client has this number.
            KeyError: the client is in another process.
        """
        if isinstance(index, slice):
            return [self[client] for client in range(self._num_clients)[index]]
        client = range(self._num_clients)[index]
        if client not in self._rows:
            raise KeyError(f"the examples of client {client} are in another process")
        return self._source.rows(self._rows[client]).transformed(self._transform)

    def __iter__(self) -> Iterator[Examples]:
        """Yield the examples of each client of this process."""
        return (self[client] for client in sorted(self._rows))

    def select(self, clients: Iterable[int]) -> Self:
        """Return the examples of some clients as a copy, without those of the others."""
        chosen = list(clients)
        indices = [_indices(self._rows[client]) for client in chosen]
        ends = np.cumsum([len(own) for own in indices]).tolist()
        starts = [0, *ends[:-1]]
        packed = self._source.rows(np.concatenate([*indices, np.empty(0, np.int64)]))
        packed = packed.transformed(self._transform)
        rows = {c: slice(a, b) for c, a, b in zip(chosen, starts, ends, strict=False)}
        return type(self)(packed, rows, num_clients=self._num_clients)

    def copy(self) -> Self:
        """Return the same clients with a copy of the dataset."""
        source = Examples(self._source.features.copy(), self._source.targets.copy())
        return type(self)(
            source, self._rows, num_clients=self._num_clients, transform=self._transform
        )


def _indices(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

"""Who has which examples, without a copy for anybody: a client's examples are gathered when asked.

What is in memory is one dataset and the numbers of each client's rows, however many clients there
are; a dataset on disk (`numpy.load(..., mmap_mode="r")`) stays there until a client trains.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from fedsim.data.examples import Examples

Rows = NDArray[np.int64] | slice


class ClientShares(Sequence[Examples]):
    """Every client's examples by client number, gathered anew each time they are asked for.

    Args:
        source: the examples of all clients, and maybe of others.
        rows: which rows of `source` each client has.
        number: clients of the federation; None: all of them are in `rows`.
    """

    def __init__(
        self, source: Examples, rows: Mapping[int, Rows], *, number: int | None = None
    ) -> None:
        self._source = source
        self._rows = dict(rows)
        self._number = len(rows) if number is None else number

    @property
    def in_memory(self) -> bool:
        """Whether the examples are in memory, rather than in a file that is mapped into it."""
        part: object = self._source.features
        while isinstance(part, np.ndarray) and not isinstance(part, np.memmap):
            part = part.base
        return not isinstance(part, np.memmap)

    @property
    def nbytes(self) -> int:
        """The size of the clients' features and targets that are here."""
        each = [array[:1].nbytes for array in (self._source.features, self._source.targets)]
        return sum(self.sizes) * sum(each)

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each client that is here, in order; nothing is gathered."""
        return [self.size(client) for client in sorted(self._rows)]

    def size(self, client: int) -> int:
        """Return the number of examples of a client that is here."""
        rows = self._rows[client]
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Examples: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Examples]: ...
    def __getitem__(self, index: int | slice) -> Examples | Sequence[Examples]:
        """Return a client's examples.

        Raises:
            IndexError: there is no such client.
            KeyError: the client is in another process.
        """
        if isinstance(index, slice):
            return [self[client] for client in range(self._number)[index]]
        client = range(self._number)[index]
        if client not in self._rows:
            raise KeyError(f"the examples of client {client} are in another process")
        return self._source.rows(self._rows[client])

    def __iter__(self) -> Iterator[Examples]:
        """Yield the examples of the clients that are here, one after the other."""
        return (self[client] for client in sorted(self._rows))

    def only(self, clients: Iterable[int]) -> Self:
        """Return the shares of some clients, with a copy of their examples and of no others."""
        chosen = list(clients)
        numbers = [_numbers(self._rows[client]) for client in chosen]
        ends = np.cumsum([len(each) for each in numbers]).tolist()
        starts = [0, *ends[:-1]]
        packed = self._source.rows(np.concatenate([*numbers, np.empty(0, np.int64)]))
        rows = {c: slice(a, b) for c, a, b in zip(chosen, starts, ends, strict=False)}
        return type(self)(packed, rows, number=self._number)

    def copied(self) -> Self:
        """Return the same shares of a copy of the examples."""
        source = Examples(self._source.features.copy(), self._source.targets.copy())
        return type(self)(source, self._rows, number=self._number)


def _numbers(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

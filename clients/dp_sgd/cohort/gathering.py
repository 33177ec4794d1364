"""The lots of a cohort's clients as one batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.cohort.ragged import Ragged

_SMALL = 1 << 23  # bytes: copying so much takes a thousandth of a second

Data = tuple[Tensor, Tensor]
"""Features (n, ...) and targets (n, ...) of one client."""


class Gathering(ABC):
    """Takes the examples of lots."""

    @abstractmethod
    def batch(self, order: Sequence[int], lots: Sequence[np.ndarray], layout: Ragged) -> Data:
        """Return the lots' examples, each client's in its rows; what fills up is zero.

        Args:
            order: the clients by their place in the layout.
            lots: indices of the examples, by client.
            layout: of the rows, at least one.
        """


class Pooled(Gathering):
    """All clients' examples in one tensor, for a call in the place of one for each client."""

    def __init__(self, data: Sequence[Data]) -> None:
        features, targets = zip(*data, strict=True)
        # Rows that fill up are rows of zeros behind everybody's examples.
        self._x, self._y = (
            torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])])
            for parts in (features, targets)
        )
        ends = np.cumsum([len(x) for x in features])
        self._starts, self._nothing = np.append(0, ends[:-1]), int(ends[-1])

    def batch(self, order: Sequence[int], lots: Sequence[np.ndarray], layout: Ragged) -> Data:
        """Return the lots' examples, each client's in its rows; what fills up is zero."""
        taken = [lots[k] for k in order]
        starts = self._starts[order].repeat([len(lot) for lot in taken])
        rows = np.full(layout.rows, self._nothing)
        rows[layout.real] = np.concatenate(taken) + starts
        index = torch.from_numpy(rows).to(self._x.device)
        return self._x.index_select(0, index), self._y.index_select(0, index)


class ByClient(Gathering):
    """Each client's examples where they are."""

    def __init__(self, data: Sequence[Data]) -> None:
        self._data = data

    def batch(self, order: Sequence[int], lots: Sequence[np.ndarray], layout: Ragged) -> Data:
        """Return the lots' examples, each client's in its rows; what fills up is zero."""
        x, y = (part.new_zeros(layout.rows, *part.shape[1:]) for part in self._data[0])
        rows = zip(layout.clients, layout.own_rows(x), layout.own_rows(y), strict=True)
        for place, own_x, own_y in rows:
            client = order[place]
            features, targets = self._data[client]
            index = torch.from_numpy(lots[client]).to(x.device)
            torch.index_select(features, 0, index, out=own_x)
            torch.index_select(targets, 0, index, out=own_y)
        return x, y


def gathering_of(data: Sequence[Data], *, together: bool) -> Gathering:
    """Return how the examples of clients are taken.

    Args:
        data: of each client.
        together: whether there are many clients with small models, so that calls count.
    """
    size = sum(part.nbytes for both in data for part in both)
    return Pooled(data) if together and size <= _SMALL else ByClient(data)

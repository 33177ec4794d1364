"""The client of each training example."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

LEFT_OUT = -1
"""In place of a client's number: the example is on no client."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """The client of each training example.

    Attributes:
        clients: int64 (n,), from 0, or `LEFT_OUT`.
        names: public name of each client; None: clients have numbers alone.
        num_clients: number of clients, those without examples included.
    """

    clients: NDArray[np.int64]
    names: tuple[str, ...] | None
    num_clients: int

    @classmethod
    def by_name(cls, values: Sequence[str], *, order: bool = True) -> Self:
        """Return a client for each value, in the order of the values.

        Args:
            values: the name of each example's client.
            order: whether to sort the values, as numbers where all are; else they stay in the order
                of their first appearance.
        """
        names = list(dict.fromkeys(values))
        if order:
            names.sort(key=_number if all(_is_number(name) for name in names) else str)
        numbers = {name: number for number, name in enumerate(names)}
        clients = np.array([numbers[value] for value in values], np.int64)
        return cls(clients, tuple(names), len(names))


def _is_number(name: str) -> bool:
    return name.lstrip("+-").isdecimal()


def _number(name: str) -> tuple[int, str]:
    return int(name), name

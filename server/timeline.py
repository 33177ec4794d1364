"""Where the time of a round goes, in parts that add up."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

PARTS = {
    "sample": "choose who takes part and make the requests",
    "train": "wait for the replies of clients, which charge and train",
    "aggregate": "check the replies and add them up",
    "evaluate": "the new global model on the test set, and on what clients hold out",
    "account": "ε of every client",
}


class Timeline:
    """Splits wall-clock time into parts; a part inside another interrupts it.

    Guarantee: the seconds of all parts add up to the time spent in parts, each moment counted once.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part."""
        return dict(self._seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside towards a part.

        Raises:
            KeyError: there is no such part.
        """
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def waiting(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time that it takes to get each counts towards a part."""
        iterator = iter(items)
        while True:
            with self.part(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _count(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

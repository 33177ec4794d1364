"""Wall-clock time of a round, divided into parts."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

PARTS = {
    "sample": "choose the participants and make the requests",
    "train": "wait for clients, which charge their accounts and train",
    "aggregate": "check the replies and aggregate them",
    "evaluate": "the new global model on the test set, and on held-out examples",
    "account": "ε of every client",
}


class Timeline:
    """Divides wall-clock time into parts; a part inside another one interrupts it.

    Guarantee: the seconds of all parts sum to the time spent in parts; each moment counts once.

    Args:
        clock: monotonic seconds.
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
        """Yield the items; the wait for each item counts towards a part."""
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

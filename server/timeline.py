"""Wall-clock time of a round, divided into parts."""

import time
from collections.abc import Callable, Mapping

PARTS = {
    "sample": "choose the participants and make the requests",
    "train": "wait for clients, which charge their accounts and train",
    "aggregate": "check the replies and aggregate them",
    "evaluate": "the new global model on the test set, and on held-out examples",
    "account": "ε of every client",
}


class Timeline:
    """Divides wall-clock time into parts, one after the other; a part may come again.

    Guarantee: the seconds of all parts sum to the time from the first `begin` to the last one.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part."""
        return dict(self._seconds)

    def begin(self, part: str | None) -> None:
        """End the current part and begin another; None: none.

        Raises:
            KeyError: there is no such part.
        """
        now = self._clock()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        if part is not None and part not in self._seconds:
            raise KeyError(part)
        self._part, self._since = part, now

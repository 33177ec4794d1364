"""Phases of a command that have no rounds, such as "checking the model": announced, and timed."""

import logging
from collections.abc import Callable
from time import perf_counter

_log = logging.getLogger(__name__)

AnnouncePhase = Callable[[str], None]


def _announce_nothing(name: str) -> None:
    """Announce a phase to nobody."""


class Phases:
    """One phase after another; a phase ends where the next one begins.

    Args:
        announce: called with the name of each phase at its start, and with "" at the end of the
            last one.
    """

    def __init__(self, announce: AnnouncePhase = _announce_nothing) -> None:
        self._announce = announce
        self._seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def begin(self, name: str) -> None:
        """Begin a phase.

        Args:
            name: what is done, for people: "checking the model".
        """
        self._close()
        self._name, self._start = name, perf_counter()
        self._announce(name)

    def end(self) -> None:
        """End the last phase; without one, nothing happens."""
        if self._name:
            self._close()
            self._announce("")

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of each ended phase, in the order of their first starts."""
        return dict(self._seconds)

    def _close(self) -> None:
        if self._name:
            spent = perf_counter() - self._start
            _log.info("%s: %.2f s", self._name, spent)
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
        self._name = ""

"""A command at work: its phases, announced and timed, and its orderly end by Ctrl-C and SIGTERM.

Only a program's main function may install handlers; a library leaves signals to its caller.
"""

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Raises KeyboardInterrupt at the first signal; later ones do not disturb the orderly end.

    Attributes:
        received: the first signal; None before it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in the block; a signal that is ignored stays ignored.

        Only the main thread receives signals, so in another thread nothing happens.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                # A program that was interrupted is about to end: no later signal changes how.
                signal.signal(number, handler if self.received is None else signal.SIG_IGN)

    def raise_again(self) -> None:
        """Raise the interrupt again if a signal was received: library code may have lost it.

        Raises:
            KeyboardInterrupt: a signal was received.
        """
        if self.received is not None:
            raise KeyboardInterrupt(self.reason)

    @property
    def reason(self) -> str:
        """What interrupted the program, in words."""
        return (
            "terminated by SIGTERM"
            if self.received == signal.SIGTERM
            else "interrupted by the user"
        )

    @property
    def exit_code(self) -> int:
        """The exit code of an interrupted program: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            sys.stderr.write("the run is being ended in order: its summary is written\n")
            return
        self.received = signal.Signals(number)
        raise KeyboardInterrupt(self.reason)


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

"""Ctrl-C and SIGTERM for a program: each ends the work in an orderly way, once.

Only a program's main function may install handlers; a library leaves signals to its caller.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

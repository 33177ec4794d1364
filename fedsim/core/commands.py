"""What commands share: imports on demand, timed phases, and an orderly end at Ctrl-C or SIGTERM.

Only a program's main function may install signal handlers or stop garbage collection; a library
leaves both to its caller.
"""

import atexit
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from time import perf_counter
from types import FrameType
from typing import Generic, TypeVar

INTERRUPTED = "interrupted by the user"  # where no signal names another cause
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Signal handler that raises KeyboardInterrupt at the first SIGINT or SIGTERM only.

    Attributes:
        received: the first signal that arrived; None before any signal. Later ones are ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the `with` block runs.

        A signal that the process already ignores stays ignored. Only the main thread receives
        signals, so in another thread this method does nothing.
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
                # An interrupted program is about to end: later signals must not change its end.
                signal.signal(number, handler if self.received is None else signal.SIG_IGN)

    def raise_again(self) -> None:
        """Raise KeyboardInterrupt again if a signal was received; a library may have swallowed it.

        Raises:
            KeyboardInterrupt: a signal was received.
        """
        if self.received is not None:
            raise KeyboardInterrupt(self.reason)

    @property
    def reason(self) -> str:
        """Cause of the interruption in words, such as "terminated by SIGTERM"."""
        return "terminated by SIGTERM" if self.received == signal.SIGTERM else INTERRUPTED

    @property
    def exit_code(self) -> int:
        """Exit code of an interrupted program: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            sys.stderr.write("the run is being ended in order: its summary is written\n")
            return
        self.received = signal.Signals(number)
        raise KeyboardInterrupt(self.reason)


_log = logging.getLogger(__name__)

AnnouncePhase = Callable[[str], None]


class Phases:
    """Timer of the phases of a command; a phase ends when the next phase begins.

    Args:
        announce: function that is called with the name of each phase when it starts, and with ""
            when `end` ends the last phase.
    """

    def __init__(self, announce: AnnouncePhase = lambda name: None) -> None:
        self._announce = announce
        self._seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def begin(self, name: str) -> None:
        """Begin a phase and end the current one.

        Args:
            name: description of the phase for people, such as "checking the model".
        """
        self._close()
        self._name, self._start = name, perf_counter()
        self._announce(name)

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self._name:
            self._close()
            self._announce("")

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of each ended phase by name, in the order of first starts."""
        return dict(self._seconds)

    def _close(self) -> None:
        if self._name:
            spent = perf_counter() - self._start
            _log.info("%s: %.2f s", self._name, spent)
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
        self._name = ""


T = TypeVar("T")


class ByName(Mapping[str, T], Generic[T]):
    """A mapping from names to objects; looking an object up imports the object's module.

    Args:
        places: for each name the import path "package.module:attribute" of its object, in the order
            of the mapping. The tests of the package structure count these paths as imports.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.places[name].partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection while the `with` block imports modules, which saves a sixth of it.

    Afterwards all existing objects are excluded from collection, because imports create half a
    million lasting objects, which the collector would visit again and again. At the end of the
    process, which frees its memory anyway, all objects are excluded. Only main programs may use
    this: the garbage of a calling program would never be collected.
    """
    atexit.register(gc.freeze)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

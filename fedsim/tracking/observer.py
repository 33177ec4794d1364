"""Observers of a run: what they are told, and when."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedsim.core.commands import Phases

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation


class RunObserver(Protocol):
    """Callbacks of a run, such as the terminal's.

    An observer may also have a method `phase(name)`. It is called at the start of each phase
    outside of the rounds ("checking the model", "writing the report"), and with "" after the last
    of several.
    """

    def started(self, federation: "Federation", path: Path) -> None:
        """Called before the first round.

        Args:
            federation: the parts of the run.
            path: the run directory.
        """
        ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Called after each round with its line of `rounds.jsonl`."""
        ...

    def ended(self) -> None:
        """Called once, after the last round."""
        ...


def phases_of(observer: RunObserver | None) -> Phases:
    """Return phases that are announced to an observer, if it has a method for them."""
    return Phases(partial(tell_phase, observer))


def tell_phase(observer: RunObserver | None, name: str) -> None:
    """Announce a phase to an observer, if it has a method for phases.

    Args:
        observer: the observer, if any.
        name: what is being done; "" after the last of several phases.
    """
    method = getattr(observer, "phase", None)
    if method is not None:
        method(name)


class CheckingObserver:
    """Calls a check after each round, then another observer.

    Args:
        check: may raise, which ends the run.
        observer: the other observer, if any.
    """

    def __init__(self, check: Callable[[], None], observer: RunObserver | None) -> None:
        self._check = check
        self._observer = observer

    def phase(self, name: str) -> None:
        """Tell the other observer."""
        tell_phase(self._observer, name)

    def started(self, federation: "Federation", path: Path) -> None:
        """Tell the other observer."""
        if self._observer is not None:
            self._observer.started(federation, path)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Tell the other observer, then check."""
        if self._observer is not None:
            self._observer.round_finished(row)
        self._check()

    def ended(self) -> None:
        """Tell the other observer."""
        if self._observer is not None:
            self._observer.ended()

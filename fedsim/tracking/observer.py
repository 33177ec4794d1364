"""Observers of a run, the interface of a tracker, and the numbers of a round that it gets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers.

    Attributes:
        name: the experiment's name.
        path: the run directory; each tracker has its own folder in it.
        settings: the experiment with all defaults, `{"key.path": value}`.
    """

    name: str
    path: Path
    settings: Mapping[str, object]


class Tracker(Protocol):
    """A tool that records the metrics of a run."""

    def start(self, run: TrackedRun) -> None:
        """Called before the first round, and again when the run is resumed."""
        ...

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Called after each round.

        Args:
            round_number: counted from 1.
            metrics: the finite numbers of the round's line of `rounds.jsonl`; lists by length.
        """
        ...

    def finish(self) -> None:
        """Called once, after the last round."""
        ...


_SCORES = ("test_", "clients_", "train_")


def row_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return every number of a line by its name; values that are no number are left out.

    A mapping gives `key.inner`, scores by class `test_recall_per_class.0`, and any other list, such
    as `participants`, its length.
    """
    return dict(_numbers(row))


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, list) and name.startswith(_SCORES):
            yield from _numbers(
                {str(place): entry for place, entry in enumerate(value)}, f"{name}."
            )
        elif isinstance(value, list):
            yield name, len(value)
        elif isinstance(value, int | float):
            yield name, value

"""Protocols of run callbacks and of trackers, and the numbers of a round that trackers get."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation


class RunCallback(Protocol):
    """A callback object for the start, the rounds and the end of a run.

    The object may also have a method `phase(name)`. It is called at the start of each phase outside
    of the rounds ("checking the model", "writing the report"). It is called with "" after the last
    of several phases.
    """

    def started(self, federation: "Federation", path: Path) -> None:
        """Receive the federation and the run directory; called before the first round.

        Args:
            federation: the federation that runs.
            path: the run directory.
        """
        ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Receive the line of `rounds.jsonl` of a finished round; called after each round."""
        ...

    def ended(self) -> None:
        """React to the end of the run; called once, after the last round."""
        ...


class ForwardingCallback:
    """A callback that forwards each call to another callback object, if there is one.

    Args:
        callback: the other callback object, with or without a method `phase`; None for none.
    """

    def __init__(self, callback: RunCallback | None) -> None:
        self._callback = callback

    def phase(self, name: str) -> None:
        """Forward the name of a phase; "" after the last of several phases."""
        self.forward("phase", name)

    def started(self, federation: "Federation", path: Path) -> None:
        """Forward the start of the run."""
        self.forward("started", federation, path)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Forward the line of a round."""
        self.forward("round_finished", row)

    def ended(self) -> None:
        """Forward the end of the run."""
        self.forward("ended")

    def forward(self, method: str, *arguments: object) -> None:
        """Call a method of the other callback object, which may lack the method `phase`."""
        if self._callback is not None and (method != "phase" or hasattr(self._callback, "phase")):
            getattr(self._callback, method)(*arguments)


class CheckingCallback(ForwardingCallback):
    """A callback that forwards each call, and calls a check after each round.

    Args:
        check: the check, which may raise to end the run.
        callback: the callback object that gets all calls; None to call the check alone.
    """

    def __init__(self, check: Callable[[], None], callback: RunCallback | None) -> None:
        super().__init__(callback)
        self._check = check

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Forward the line of a round, then call the check."""
        super().round_finished(row)
        self._check()


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that is passed to its trackers.

    Attributes:
        name: the experiment's name.
        path: the run directory, in which each tracker has a folder.
        settings: the experiment with all defaults, as `{"key.path": value}`.
    """

    name: str
    path: Path
    settings: Mapping[str, object]


class Tracker(Protocol):
    """Protocol of a tool that records the settings and metrics of a run."""

    def start(self, run: TrackedRun) -> None:
        """Start recording; called before the first round, and again when the run is resumed."""
        ...

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a round; called after each round.

        Args:
            round_number: the round, from 1.
            metrics: the finite numbers of the round's line of `rounds.jsonl`, by name (see
                `row_numbers`).
        """
        ...

    def finish(self) -> None:
        """End the recording; called once, after the last round."""
        ...


_SCORES = ("test_", "clients_", "train_")


def row_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a round's line of `rounds.jsonl` by name; other values are left out.

    A number in a mapping is named `key.inner`. A list of scores, such as one for each class, has
    one number for each item: `test_recall_per_class.0`. The number of any other list, such as
    `participants`, is its length.
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

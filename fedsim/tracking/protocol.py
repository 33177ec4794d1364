"""The interface of a tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


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

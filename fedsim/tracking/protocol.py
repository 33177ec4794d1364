"""What a tracker is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """A run that is about to be tracked.

    Attributes:
        name: the experiment's name.
        path: the run directory; a tracker keeps its files in a folder of its own there.
        settings: the experiment as it runs, `{"key.path": value}`, defaults included.
    """

    name: str
    path: Path
    settings: Mapping[str, object]


class Tracker(Protocol):
    """Somebody who keeps the figures of a run."""

    def start(self, run: TrackedRun) -> None:
        """Called before the first round, and again when the run is resumed."""
        ...

    def log(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Called after each round with its finite figures."""
        ...

    def finish(self) -> None:
        """Called once when no round will follow."""
        ...

"""From the names in `runtime.trackers` to an observer of the run."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedsim.core.errors import ExitCode, FedsimError
from fedsim.tracking.mlflow import MlflowTracker
from fedsim.tracking.protocol import TrackedRun, Tracker
from fedsim.tracking.tensorboard import TensorBoardTracker
from fedsim.tracking.wandb import WandbTracker

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

_log = logging.getLogger(__name__)

# What each one needs to be installed; the extra has the same name.
TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


class TrackerError(FedsimError, RuntimeError):
    """A tracker that is not installed; the message names the extra."""

    exit_code = ExitCode.WRONG_INPUT


class RunObserver(Protocol):
    """Somebody who watches a run, such as the terminal."""

    def started(self, federation: "Federation", path: Path) -> None:
        """Called when the first round is about to start."""
        ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Called after each round with its line of `rounds.jsonl`."""
        ...

    def ended(self) -> None:
        """Called once when no round will follow."""
        ...


def add_trackers(names: Sequence[str], observer: RunObserver | None) -> RunObserver | None:
    """Return an observer that also tells the named trackers; the given one where there are none.

    Raises:
        TrackerError: one is not installed; nothing was started.
    """
    if not names:
        return observer
    for name in names:
        if find_spec(name) is None:
            raise TrackerError(
                f"runtime.trackers: {name} is not installed; install the extra with "
                f"pip install 'fedsim-dp[{name}]', or leave {name} out"
            )
    return _TrackingObserver({name: TRACKERS[name]() for name in names}, observer)


class _TrackingObserver:
    """Tells several trackers and another observer; a tracker that fails is told no more."""

    def __init__(self, trackers: dict[str, Tracker], observer: RunObserver | None) -> None:
        self._trackers = trackers
        self._observer = observer

    def started(self, federation: "Federation", path: Path) -> None:
        """Start the trackers."""
        experiment = federation.experiment
        settings = _flat(experiment.model_dump(mode="json"))
        run = TrackedRun(experiment.name, path, settings)
        self._tell(lambda tracker: tracker.start(run))
        if self._observer is not None:
            self._observer.started(federation, path)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Log a round."""
        figures = _figures(row)
        self._tell(lambda tracker: tracker.log(row["round"], figures))
        if self._observer is not None:
            self._observer.round_finished(row)

    def ended(self) -> None:
        """End the trackers."""
        self._tell(lambda tracker: tracker.finish())
        if self._observer is not None:
            self._observer.ended()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            # Other people's code on other people's servers: no reason to lose a run.
            except Exception as error:  # noqa: BLE001
                del self._trackers[name]
                _log.warning("tracker %s failed and is told no more: %s", name, error)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of `rounds.jsonl`, lists by their lengths."""
    figures: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            figures[name] = float(len(value))
        elif name != "round" and isinstance(value, int | float) and math.isfinite(value):
            figures[name] = float(value)
    return figures


def _flat(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{path}.{key}" if path else str(key))
    return found

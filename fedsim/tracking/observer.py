"""Observers of a run: the trackers that `runtime.trackers` names, and the user's own observer."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.phases import Phases
from fedsim.tracking.mlflow import MlflowTracker
from fedsim.tracking.protocol import TrackedRun, Tracker
from fedsim.tracking.row_numbers import row_numbers
from fedsim.tracking.tensorboard import TensorBoardTracker
from fedsim.tracking.wandb import WandbTracker

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

_log = logging.getLogger(__name__)

# A key is the name of the package that must be installed, and of the extra that brings it.
TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


class TrackerError(FedsimError, RuntimeError):
    """A tracker that is not installed; the message names the extra."""

    exit_code = ExitCode.WRONG_INPUT


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
    return Phases(partial(_tell_phase, observer))


def _tell_phase(observer: RunObserver | None, name: str) -> None:
    method = getattr(observer, "phase", None)
    if method is not None:
        method(name)


def add_trackers(names: Sequence[str], observer: RunObserver | None) -> RunObserver | None:
    """Return an observer that calls the named trackers and then `observer`.

    Args:
        names: keys of `TRACKERS`; empty: `observer` is returned unchanged.
        observer: the user's own observer, if any.

    Raises:
        TrackerError: a tracker is not installed; none was started.
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
        _tell_phase(self._observer, name)

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


class _TrackingObserver:
    """Calls several trackers, then another observer; a tracker that fails is removed."""

    def __init__(self, trackers: dict[str, Tracker], observer: RunObserver | None) -> None:
        self._trackers = trackers
        self._observer = observer

    def phase(self, name: str) -> None:
        """Tell the other observer."""
        _tell_phase(self._observer, name)

    def started(self, federation: "Federation", path: Path) -> None:
        """Start the trackers."""
        experiment = federation.experiment
        settings = _flatten(experiment.model_dump(mode="json"))
        run = TrackedRun(experiment.name, path, settings)
        self._call_trackers(lambda tracker: tracker.start(run))
        if self._observer is not None:
            self._observer.started(federation, path)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Log a round."""
        metrics = _metrics(row)
        self._call_trackers(lambda tracker: tracker.log(row["round"], metrics))
        if self._observer is not None:
            self._observer.round_finished(row)

    def ended(self) -> None:
        """End the trackers."""
        self._call_trackers(lambda tracker: tracker.finish())
        if self._observer is not None:
            self._observer.ended()

    def _call_trackers(self, method: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                method(tracker)
            # External code and servers may fail in any way; the run must not fail with them.
            except Exception as error:  # noqa: BLE001
                del self._trackers[name]
                _log.warning("tracker %s failed and was removed: %s", name, error)


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of `rounds.jsonl`, without its round."""
    numbers = row_numbers({name: value for name, value in row.items() if name != "round"})
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _flatten(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= _flatten(inner, f"{path}.{key}" if path else str(key))
    return found

"""The trackers that `runtime.trackers` may name: built in, or a plug-in `./file.py:Tracker`.

A plug-in is a class or function without arguments. It returns a tracker (`start`, `log`, `finish`)
or a callback object (`started`, `round_finished`, `ended`). A tracker that fails is removed with a
warning.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedsim.core.commands import ByName
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.plugin_errors import contained_exits, describe_error, plugin_calls
from fedsim.core.plugins import resolve
from fedsim.experiment.schema import flat_settings
from fedsim.tracking.callbacks import (
    ForwardingCallback,
    RunCallback,
    TrackedRun,
    Tracker,
    row_numbers,
)

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

_log = logging.getLogger(__name__)

# A key is the name of the package that must be installed, and of the extra that installs it.
TRACKERS: Mapping[str, Callable[[], Tracker]] = ByName(
    {
        "tensorboard": "fedsim.tracking.tensorboard:TensorBoardTracker",
        "mlflow": "fedsim.tracking.mlflow:MlflowTracker",
        "wandb": "fedsim.tracking.wandb:WandbTracker",
    }
)
_TRACKER = ("start", "log", "finish")
_OBSERVER = ("started", "round_finished", "ended")


class TrackerError(FedsimError, RuntimeError):
    """Error of a tracker that is not installed or lacks a method; the message names the fix."""

    exit_code = ExitCode.WRONG_INPUT


def add_trackers(
    names: Sequence[str], callback: RunCallback | None, *, base: Path
) -> ForwardingCallback:
    """Return a callback object that forwards calls to the named trackers, then to `callback`.

    Args:
        names: keys of `TRACKERS` and plug-ins; may be empty.
        callback: the user's callback object; None without one.
        base: the directory in which relative paths of plug-ins start.

    Raises:
        TrackerError: a tracker is not installed or lacks a method; no tracker was started.
        PluginError: the plug-in of a tracker cannot be loaded.
    """
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise TrackerError(
                f"runtime.trackers: {name} is not installed; install the extra with "
                f"pip install 'fedsim-dp[{name}]', or leave {name} out"
            )
    trackers = {name: ForwardingCallback(_watcher(name, base)) for name in names}
    return _TrackingObserver(trackers, callback)


def _watcher(name: str, base: Path) -> RunCallback:
    """Return the callback object of a named tracker or plug-in."""
    if name in TRACKERS:
        return _TrackerObserver(TRACKERS[name]())
    make = resolve(name, base=base, setting="runtime.trackers")
    with plugin_calls(f"runtime.trackers {name!r}: calling it without arguments failed"):
        made = make()
    if _has(made, _OBSERVER):
        return cast(RunCallback, made)
    if _has(made, _TRACKER):
        return _TrackerObserver(cast(Tracker, made))
    raise TrackerError(
        f"runtime.trackers {name!r}: returned a {type(made).__name__}, which is neither a tracker "
        f"(methods {', '.join(_TRACKER)}) nor a callback ({', '.join(_OBSERVER)})"
    )


def _has(made: object, methods: Sequence[str]) -> bool:
    return all(callable(getattr(made, method, None)) for method in methods)


class _TrackerObserver:
    """A callback object that passes a run's settings and numbers to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def started(self, federation: "Federation", path: Path) -> None:
        """Start the tracker."""
        experiment = federation.experiment
        settings = flat_settings(experiment)
        self._tracker.start(TrackedRun(experiment.name, path, settings))

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Log the finite numbers of a round."""
        numbers = row_numbers({name: value for name, value in row.items() if name != "round"})
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        self._tracker.log(row["round"], finite)

    def ended(self) -> None:
        """End the tracker."""
        self._tracker.finish()


class _TrackingObserver(ForwardingCallback):
    """Calls trackers and then another callback object; a tracker that fails is removed."""

    def __init__(
        self, trackers: dict[str, ForwardingCallback], callback: RunCallback | None
    ) -> None:
        super().__init__(callback)
        self._trackers = trackers

    def forward(self, method: str, *arguments: object) -> None:
        """Call a method of every tracker, then of the other callback object."""
        for name, tracker in list(self._trackers.items()):
            try:
                with contained_exits():
                    tracker.forward(method, *arguments)
            # External code and servers may fail in any way; the run must not fail with them.
            except Exception as error:  # noqa: BLE001
                del self._trackers[name]
                _log.warning("tracker %s failed and was removed: %s", name, describe_error(error))
        super().forward(method, *arguments)

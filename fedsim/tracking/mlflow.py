"""Tracker for MLflow: logs to `MLFLOW_TRACKING_URI`, or to `mlflow/` in the run directory."""

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fedsim.tracking.callbacks import TrackedRun

_MAX_VALUE_CHARS = 500  # MLflow refuses longer parameters
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")  # MLflow refuses parameters with other characters


class MlflowTracker:
    """A tracker that logs settings as MLflow parameters, and metrics by round (extra `mlflow`).

    The tracker uses a separate MLflow client, so that MLflow's global state, which the caller may
    use, does not change.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Create an MLflow run; a resumed run continues the MLflow run that it began."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # else newer versions need a database
        client_class = import_module("mlflow.tracking").MlflowClient
        folder = run.path / "mlflow"
        folder.mkdir(exist_ok=True)
        store = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "runs").absolute().as_uri()
        self._client = client_class(tracking_uri=store)
        id_file = folder / "run_id.txt"
        if id_file.is_file():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name("fedsim")
        experiment = known.experiment_id if known else self._client.create_experiment("fedsim")
        self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        id_file.write_text(self._run_id + "\n", encoding="utf-8")
        for key, value in run.settings.items():
            name = _NOT_IN_NAMES.sub("_", key)  # patterns, such as `layers.*`, are parts of keys
            self._client.log_param(self._run_id, name, str(value)[:_MAX_VALUE_CHARS])

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round to MLflow."""
        now = int(time.time() * 1000)
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value, timestamp=now, step=round_number)

    def finish(self) -> None:
        """Mark the MLflow run as ended."""
        self._client.set_terminated(self._run_id)

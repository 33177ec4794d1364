"""Tracker for Weights & Biases, which writes an offline run in `wandb/` of the run directory."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

from fedsim.tracking.callbacks import TrackedRun


class WandbTracker:
    """A tracker that logs settings and metrics offline, for `wandb sync` (extra `wandb`)."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open an offline run; a resumed run has the same id, so `wandb sync` joins the two."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = import_module("wandb")
        folder = run.path / "wandb"
        folder.mkdir(exist_ok=True)
        id_file = folder / "run_id.txt"
        if not id_file.is_file():
            id_file.write_text(uuid4().hex[:12] + "\n", encoding="utf-8")
        self._run = wandb.init(
            project="fedsim",
            name=run.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            dir=str(run.path),
            config=dict(run.settings),
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round to the offline run."""
        self._run.log(dict(metrics), step=round_number)

    def finish(self) -> None:
        """Write the remaining data to disk and close the offline run."""
        self._run.finish()

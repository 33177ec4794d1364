"""Weights & Biases, offline: files in `wandb/` of the run directory (extra `wandb`)."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

from fedsim.tracking.protocol import TrackedRun


class WandbTracker:
    """Logs settings and figures into an offline run; `wandb sync` uploads it if you want that."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open an offline run; a resumed run has the same id, so that both sync into one."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = import_module("wandb")
        folder = run.path / "wandb"
        folder.mkdir(exist_ok=True)
        remembered = folder / "run_id.txt"
        if not remembered.is_file():
            remembered.write_text(uuid4().hex[:12] + "\n", encoding="utf-8")
        self._run = wandb.init(
            project="fedsim",
            name=run.name,
            id=remembered.read_text(encoding="utf-8").strip(),
            dir=str(run.path),
            config=dict(run.settings),
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )

    def log(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a round."""
        self._run.log(dict(figures), step=round_number)

    def finish(self) -> None:
        """Write out what there is."""
        self._run.finish()

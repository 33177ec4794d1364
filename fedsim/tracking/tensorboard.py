"""Tracker for TensorBoard, which writes event files in `tensorboard/` of the run directory."""

from collections.abc import Mapping
from typing import Any

from fedsim.tracking.callbacks import TrackedRun


class TensorBoardTracker:
    """A tracker that writes metrics as TensorBoard scalars (extra `tensorboard`)."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open an event file; a resumed run opens a second file, and TensorBoard joins the two."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"))
        lines = (f"    {key}: {value}" for key, value in run.settings.items())
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round and flush them, so that TensorBoard shows them at once."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()

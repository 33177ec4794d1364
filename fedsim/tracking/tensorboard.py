"""TensorBoard: event files in `tensorboard/` of the run directory (extra `tensorboard`)."""

from collections.abc import Mapping
from typing import Any

from fedsim.tracking.protocol import TrackedRun


class TensorBoardTracker:
    """Writes every figure as a scalar over the rounds; `tensorboard --logdir runs` shows them."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open an event file; a resumed run gets a second one, which TensorBoard reads as one."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"))
        lines = (f"    {key}: {value}" for key, value in run.settings.items())
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a round, so that they can be watched at once."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()

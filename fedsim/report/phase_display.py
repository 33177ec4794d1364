"""Phases of a command on stderr, while they last."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fedsim.core.commands import Phases
from fedsim.report.lines import print_sentence

_PATIENCE_SECONDS = 5.0  # without a terminal, a phase that lasts longer gets a line


class PhaseDisplay:
    """The current phase: a spinner with its time; without a terminal, a line if it lasts.

    Args:
        console: where to print.
        patience: seconds before a phase gets a line where there is no terminal.
    """

    def __init__(self, console: Console, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._console, self._patience = console, patience
        self._progress: Progress | None = None
        self._timer: Timer | None = None

    def show(self, name: str) -> None:
        """Show a phase in place of the one before; "" shows none."""
        if self._timer is not None:
            self._timer.cancel()
        if self._progress is not None:
            self._progress.stop()
        self._timer = self._progress = None
        if not name:
            return
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(name, total=None)
            self._progress.start()
        else:
            self._timer = Timer(self._patience, print_sentence, (self._console, f"{name} ..."))
            self._timer.daemon = True
            self._timer.start()


@contextmanager
def shown_phases(console: Console | None = None) -> Iterator[Phases]:
    """Yield phases that are shown on stderr while they last."""
    phases = Phases(PhaseDisplay(console or Console(stderr=True)).show)
    try:
        yield phases
    finally:
        phases.end()

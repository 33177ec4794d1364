"""Progress on stderr: the phases of a command, and the headline, warnings and rounds of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from fedsim.core.commands import Phases
from fedsim.core.formatting import epsilon_text, metric_text
from fedsim.federation.federation import Federation
from fedsim.report.headline import headline, notes, warnings
from fedsim.report.terminal_text import print_sentence
from fedsim.server.round_report import numbers_of

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


_MAX_METRICS = 3  # in the line of a round
_MAX_NAMES = 5  # of parameters in a warning


class ProgressObserver:
    """A progress bar with the current metric and the largest ε; without a terminal, lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._phase = PhaseDisplay(self._console)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            _TimeLeft(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._rounds = 0
        self._pace = _Pace()

    def phase(self, name: str) -> None:
        """Show a phase outside of the rounds; "" shows none."""
        self._phase.show(name)

    def started(self, federation: Federation, path: Path) -> None:
        """Print a headline and warnings, and start the bar."""
        self._rounds = federation.experiment.federation.rounds
        for line in headline(federation):
            print_sentence(self._console, line)
        for note in notes(federation):
            print_sentence(self._console, f"note: {note}")
        for warning in warnings(federation):
            print_sentence(self._console, f"warning: {warning}", style="yellow")
        self._pace = _Pace()
        if self._console.is_terminal:
            self._task = self._progress.add_task(
                f"{self._rounds} rounds", total=self._rounds, figures="", end=None
            )
            self._progress.start()

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Advance the bar, or print a line."""
        figures = _figures(row)
        for word, key in (("failed", "failed"), ("withdrew", "withdrawn")):
            for one in row[key]:
                text = f"round {row['round']}: client {one['client']} {word}: {one['reason']}"
                print_sentence(self._console, text, style="yellow")
        for one in (row.get("evaluated") or {"failed": ()})["failed"]:
            text = f"round {row['round']}: client {one['client']} did not evaluate: {one['reason']}"
            print_sentence(self._console, text, style="yellow")
        if unmoved := row.get("unmoved"):
            more = f" and {len(unmoved) - _MAX_NAMES} more" if len(unmoved) > _MAX_NAMES else ""
            text = (
                f"warning: round {row['round']} left {', '.join(unmoved[:_MAX_NAMES])}{more} as "
                "before: no update reached these parameters; raise local.optimizer.lr, and check "
                "federation.strategy"
            )
            print_sentence(self._console, text, style="yellow")
        done = int(row["round"])
        end = self._pace.end_after(self._rounds - done)
        if self._task is not None:
            text = f"round {min(done + 1, self._rounds)} of {self._rounds}"
            self._progress.update(
                self._task, completed=done, description=text, figures=figures, end=end
            )
        else:
            left = f", {text}" if (text := _left_text(end)) else ""
            self._console.print(f"round {done}/{self._rounds}{left}  {figures}", highlight=False)

    def ended(self) -> None:
        """Stop the bar."""
        if self._task is not None:
            self._progress.stop()


class _Pace:
    """Time of the rounds of this process, to predict when the last one ends."""

    def __init__(self) -> None:
        self._start, self._rounds = monotonic(), 0

    def end_after(self, rounds: int) -> float:
        """Note a finished round, and return when `rounds` more end, on the monotonic clock."""
        self._rounds += 1
        now = monotonic()
        return now + (now - self._start) / self._rounds * rounds


class _TimeLeft(ProgressColumn):
    """The time that is left; it counts down between rounds."""

    def render(self, task: Task) -> Text:
        """Return the text; empty before the first round."""
        end = task.fields["end"]
        return Text("" if end is None else _left_text(end))


def _left_text(end: float) -> str:
    """Return the time until a moment of the monotonic clock, as "12 s left"; "" below 1 s."""
    seconds = round(end - monotonic())
    if seconds < 1:
        return ""
    minutes, rest = divmod(seconds, 60)
    hours, minutes_rest = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_rest} min left"
    return f"{minutes} min {rest} s left" if minutes else f"{seconds} s left"


def _figures(row: Mapping[str, Any]) -> str:
    test, clients = numbers_of(row, ("test_",)), numbers_of(row, ("clients_",))
    parts = [
        f"{name.removeprefix('test_')} {metric_text(name, value)}"
        for name, value in test.items()
        if name != "test_loss"
    ][:_MAX_METRICS]
    parts += [
        f"{name.replace('_', ' ')} {metric_text(name, value)}"
        for name, value in clients.items()
        if name != "clients_loss"
    ]
    if row["epsilon_max"] is not None:
        parts.append(f"ε ≤ {epsilon_text(row['epsilon_max'])}")
    return "  ".join(parts)

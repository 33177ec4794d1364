"""Display of a run's progress on stderr or in a notebook: headline, warnings and rounds."""

import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from rich import progress
from rich.console import Console
from rich.text import Text

from fedsim.core.commands import Phases
from fedsim.core.formatting import (
    count_text,
    delta_text,
    duration_text,
    epsilon_text,
    metric_text,
    printable,
    range_text,
    some_of,
)
from fedsim.data.settings import FileDataset
from fedsim.federation.assembly import full_batch_note, privacy_warnings
from fedsim.federation.client_plans import ignored_weighting
from fedsim.federation.federation import Federation
from fedsim.federation.first_checks import still_warnings
from fedsim.report.terminal import print_sentence
from fedsim.runs.records import MIN_REPETITIONS
from fedsim.server.round_report import numbers_of

_MAX_NAMES = 5
_MAX_NAME_CHARS = 80
_LARGE_FEATURE = 100.0  # absolute value above which gradients of usual models explode
_MAX_FEATURE_RATIO = 100.0  # largest ratio of the largest feature to the median, without a note
_MAX_NAMED_FEATURES = 3


def headline(federation: Federation) -> list[str]:
    """Return the lines that introduce a run: data, rounds and privacy; no private size is shown."""
    experiment = federation.experiment
    first = (
        f"{experiment.name}: {_clients(federation)} with "
        f"{_sizes(federation)}, {len(federation.data.test):,} test examples, "
        f"{experiment.task_facts.work(experiment.federation.rounds, experiment.local)}"
    )
    plans, privacy = federation.plan.clients, experiment.privacy
    if plans is None or privacy is None or experiment.not_private:
        return [first, experiment.not_private]
    goal = privacy.goal or "given noise"
    trust = "" if privacy.trust.name == "local" else f", {privacy.trust.name} trust"
    noise = range_text([plan.noise_multiplier for plan in plans], digits=3)
    delta = delta_text(max(plan.delta for plan in plans))
    releases = experiment.release_kind.releases
    return [first, f"{releases}{trust}: {goal} at δ = {delta}, noise multiplier {noise}"]


def notes(federation: Federation) -> list[str]:
    """Return notes on a batch size, a weighting or feature scales that do not fit the data."""
    experiment = federation.experiment
    candidates = (
        full_batch_note(experiment, federation.data.clients.sizes),
        ignored_weighting(experiment, federation.plan.weights),
        scale_note(federation.data.test.features, _feature_names(federation)),
    )
    return [note for note in candidates if note is not None]


def scale_note(features: NDArray[np.generic], names: Sequence[str] | None) -> str | None:
    """Return a note if the scales of the features differ too much or are too large, else None.

    The largest features then dominate the gradients, so the model learns little from the others.
    `features` (n, ...) are those of the public test set, as the model gets them; `names` are those
    of the k features if `features` is (n, k).
    """
    if features.dtype.kind != "f" or not len(features):
        return None
    flat = np.abs(features.reshape(len(features), -1)).max(axis=0)
    used = flat[flat > 0]
    if not used.size:
        return None
    usual = float(np.median(used))
    limit = min(_LARGE_FEATURE, _MAX_FEATURE_RATIO * usual)
    if used.max() <= limit:
        return None
    if features.ndim > 2 or names is None or len(names) != len(flat):
        return (
            f"features of the public test set are as large as {used.max():,.4g} (the median "
            f"feature: {usual:,.4g}), and SGD learns little from such scales; divide them by a "
            "public constant: data.images: {scale: ...} for images, model.features: [{standardize: "
            "{mean: ..., std: ...}}] for others"
        )
    large = [index for index in np.argsort(-flat, kind="stable") if flat[index] > limit]
    shown = some_of([f"{names[i]} up to {flat[i]:,.4g}" for i in large], _MAX_NAMED_FEATURES)
    return (
        f"features of the public test set span orders of magnitude ({shown}; the median "
        f"feature up to {usual:,.4g}), and SGD learns little from such scales; set public bounds: "
        f"data.dataset.columns: {{{names[large[0]]}: {{range: [LOW, HIGH]}}}}, with log: true "
        "where few values are large"
    )


def _clients(federation: Federation) -> str:
    """Return the number of clients as text, with the names of a few clients if they have names."""
    count, names = count_text(federation.num_clients, "client"), federation.data.client_names
    if names is None or len(names) > _MAX_NAMES or sum(map(len, names)) > _MAX_NAME_CHARS:
        return count
    return f"{count} ({', '.join(map(printable, names))})"


def _feature_names(federation: Federation) -> list[str] | None:
    """Return the names of a table's features; None where `model.features` changes them."""
    experiment, columns = federation.experiment, federation.data.columns
    dataset = experiment.data.dataset
    if columns is None or not isinstance(dataset, FileDataset) or experiment.model.features:
        return None
    return [name for key in columns for name in dataset.constants_of(key).feature_names(key)]


def _sizes(federation: Federation) -> str:
    privacy = federation.experiment.privacy
    declared = None if privacy is None else privacy.adjacency.declared_examples
    if declared is not None:
        return f"{declared:,} declared examples each"
    if federation.experiment.release_kind.protects_client:
        return "private numbers of examples"
    return f"{range_text(federation.data.clients.sizes)} examples"


def warnings(federation: Federation) -> list[str]:
    """Return warnings to print before a run: on still parameters, large δ and private constants."""
    return [*still_warnings(federation.model.still), *privacy_warnings(federation)]


_PATIENCE_SECONDS = 5.0  # without a terminal, only a longer phase gets a line


class PhaseDisplay:
    """Display of the current phase of a run before or after the rounds: "checking the model".

    In a terminal it is a spinner with the elapsed time; elsewhere a line of text, for a phase that
    takes longer than `patience` seconds.
    """

    def __init__(self, console: Console, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._console, self._patience = console, patience
        self._shown = ExitStack()  # closing it ends the display of the current phase

    def show(self, name: str) -> None:
        """Show the name of a phase in place of the last one; "" ends the display."""
        self._shown.close()
        if not name:
            return
        if self._console.is_terminal:
            spinner = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            spinner.add_task(name, total=None)
            self._shown.enter_context(spinner)
        else:
            timer = Timer(self._patience, print_sentence, (self._console, f"{name} ..."))
            timer.daemon = True
            timer.start()
            self._shown.callback(timer.cancel)


@contextmanager
def shown_phases() -> Iterator[Phases]:
    """Yield an object to which a run reports its phases; the object shows them on stderr."""
    phases = Phases(PhaseDisplay(Console(stderr=True)).show)
    try:
        yield phases
    finally:
        phases.end()


_MAX_METRICS = 3  # in the line of a round


class ProgressCallback:
    """Callback that shows the rounds of a run, with metrics and the largest ε.

    In a terminal it shows a progress bar; elsewhere it prints a line for each round.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._phase = PhaseDisplay(self._console)
        self._progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            _TimeLeft(),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeElapsedColumn(),
            console=self._console,
        )
        self._task: progress.TaskID | None = None
        self._rounds, self._finished, self._start = 0, 0, monotonic()
        self._failures = Counter[tuple[int, str]]()

    def phase(self, name: str) -> None:
        """Show the name of a phase before or after the rounds; "" ends the display."""
        self._phase.show(name)

    def started(self, federation: Federation, path: Path) -> None:
        """Print a headline and warnings, and start the progress bar."""
        self._rounds = federation.experiment.federation.rounds
        for line in (*headline(federation), *(f"note: {note}" for note in notes(federation))):
            print_sentence(self._console, line)
        for warning in warnings(federation):
            self._warn(f"warning: {warning}")
        self._start = monotonic()
        if self._console.is_terminal:
            self._task = self._progress.add_task(
                f"{self._rounds} rounds", total=self._rounds, figures="", end=None
            )
            self._progress.start()

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Show the figures of a finished round, and print failures and withdrawals of clients."""
        done, figures = int(row["round"]), _figures(row)
        for entry in row["failed"]:
            self._print_failure(done, entry["client"], str(entry["reason"]))
        unevaluated = (row.get("evaluated") or {}).get("failed", ())
        for what, entries in (("withdrew", row["withdrawn"]), ("did not evaluate", unevaluated)):
            for entry in entries:
                self._warn(f"round {done}: client {entry['client']} {what}: {entry['reason']}")
        if unmoved := row.get("unmoved"):
            self._warn(
                f"warning: round {done} left {some_of(unmoved, _MAX_NAMES)} as before: no update "
                "reached these parameters; raise local.optimizer.lr, and check federation.strategy"
            )
        self._finished += 1
        now = monotonic()
        end = now + (now - self._start) / self._finished * (self._rounds - done)
        if self._task is not None:
            text = f"round {min(done + 1, self._rounds)} of {self._rounds}"
            self._progress.update(
                self._task, completed=done, description=text, figures=figures, end=end
            )
        else:
            left = f", {text}" if (text := _left_text(end)) else ""
            self._console.print(f"round {done}/{self._rounds}{left}  {figures}", highlight=False)

    def _warn(self, text: str) -> None:
        print_sentence(self._console, text, style="yellow")

    def _print_failure(self, round_number: int, client: int, reason: str) -> None:
        """Print that a client failed; a reason that repeats is a warning once, and silent later."""
        self._failures[client, reason] += 1
        if (count := self._failures[client, reason]) < MIN_REPETITIONS:
            self._warn(f"round {round_number}: client {client} failed: {reason}")
        elif count == MIN_REPETITIONS:
            self._warn(
                f"warning: client {client} failed in {count} rounds with the same reason (later "
                f"rounds like these are counted in the report): {reason}"
            )

    def ended(self) -> None:
        """Stop the progress bar."""
        if self._task is not None:
            self._progress.stop()


class _TimeLeft(progress.ProgressColumn):
    """Column of the progress bar with the time that is left; it counts down between rounds."""

    def render(self, task: progress.Task) -> Text:
        """Return the text; empty before the first round."""
        end = task.fields["end"]
        return Text("" if end is None else _left_text(end))


def _left_text(end: float) -> str:
    """Return the time until a moment of the monotonic clock, as "12 s left"; "" below 1 s."""
    seconds = round(end - monotonic())
    if seconds >= 60:
        return f"{duration_text(seconds)} left"
    return f"{seconds} s left" if seconds > 0 else ""


def _figures(row: Mapping[str, Any]) -> str:
    numbers = numbers_of(row, ("test_", "clients_"))
    losses = ("test_loss", "clients_loss")
    texts = {k: metric_text(k, v) for k, v in numbers.items() if k not in losses}
    test = [f"{k.removeprefix('test_')} {v}" for k, v in texts.items() if k.startswith("test_")]
    clients = [f"{k.replace('_', ' ')} {v}" for k, v in texts.items() if k.startswith("clients_")]
    parts = [*test[:_MAX_METRICS], *clients]
    if row["epsilon_max"] is not None:
        parts.append(f"ε ≤ {epsilon_text(row['epsilon_max'])}")
    return "  ".join(parts)


_MAX_LINES = 40
_WIDTH = 100
# Lines that count or name a phase: `round 3/20`, `3/9  eps-6, seed 1`, `checking the model ...`.
_PASSING = re.compile(r"(?:round )?(?P<done>\d+)/(?P<total>\d+)\b.*|.* \.\.\.")


def notebook_progress() -> ProgressCallback | None:
    """Return a callback that shows a run's progress in a notebook; None outside of notebooks."""
    return None if (console := notebook_console()) is None else ProgressCallback(console)


def notebook_console() -> Console | None:
    """Return a console that prints into the notebook's running cell; None outside of notebooks."""
    ipython: Any = sys.modules.get("IPython")  # loaded in a notebook already
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # IPython in a terminal has no kernel
        return None
    area = NotebookArea(import_module("IPython.display"))
    return Console(file=area, width=_WIDTH, force_terminal=False, force_jupyter=False)


class NotebookArea(io.StringIO):
    """A text stream that shows the last lines written to it as one output of a notebook cell.

    A line such as "round 3/20" or "checking the model ..." is replaced by the next line. While it
    is the last line, a progress bar is shown below it, in notebooks that show HTML. `display` is
    the module `IPython.display`.
    """

    def __init__(self, display: Any) -> None:
        super().__init__()
        self._display, self._id, self._shown = display, uuid4().hex, False
        self._rest, self._lines = "", list[str]()

    def write(self, text: str, /) -> int:
        """Add text to the stream, show all complete lines, and return the length of the text."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if self._lines and _PASSING.fullmatch(self._lines[-1]):
                self._lines.pop()
            self._lines.append(line)
        if lines:
            self._show()
        return len(text)

    def _show(self) -> None:
        text = "\n".join(self._lines[-_MAX_LINES:])
        bundle = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>{self._bar()}"}
        show = self._display.update_display if self._shown else self._display.display
        show(bundle, raw=True, display_id=self._id)
        self._shown = True

    def _bar(self) -> str:
        """Return the progress bar of the last line; a phase's bar has no end, other lines none."""
        passing = _PASSING.fullmatch(self._lines[-1])
        if passing is None:
            return ""
        done, total = passing["done"], passing["total"]
        share = "" if done is None else f' value="{done}" max="{total}"'
        return f'<progress style="width: 30em"{share}></progress>'

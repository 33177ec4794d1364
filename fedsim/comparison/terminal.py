"""Terminal output of a comparison: progress on stderr, the table of results on stdout."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.differences import SettingsTable
from fedsim.comparison.jobs import Job
from fedsim.comparison.load import LoadedComparison
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import (
    OTHER_VALUES,
    baseline_note,
    common_words,
    groups_table,
    guarantee_text,
    mean_text,
    metric_words,
    minus_text,
    notes_of,
    p_text,
    score_warnings,
    scores_table,
    seconds_text,
    seeds_text,
    unfit_sentences,
)
from fedsim.report.terminal import print_sentence, print_table

_MAX_COLUMNS = 4


class ComparisonProgress:
    """The progress of a comparison in the terminal: bars for all runs, or plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._all = self._progress.add_task("[bold]runs", total=None)
        self._tasks: dict[str, TaskID] = {}
        self._pending = self._done = 0

    def planned(self, comparison: LoadedComparison, jobs: list[Job], workers: int) -> None:
        """Print the numbers of planned and finished runs, and start the progress bars."""
        pending = [job for job in jobs if job.is_pending]
        self._pending, self._done = len(pending), 0
        facts = {
            "already finished": len(jobs) - len(pending),
            "to resume": sum(job.action == "resume" for job in pending),
            "in parallel": workers if pending else 0,
        }
        text = f": {len(jobs)} runs of {len(comparison.variants)} variants"
        text += "".join(f", {number} {words}" for words, number in facts.items() if number)
        self._console.print(Text.assemble((comparison.name, "bold"), text))
        self._progress.reset(self._all, total=len(pending))
        if pending and self._console.is_terminal:
            self._progress.start()

    def worker_message(self, job: Job, message: Mapping[str, Any]) -> None:
        """Advance a run's progress bar, and print a line when the run has ended."""
        name, event = f"{job.variant}, seed {job.seed}", message["event"]
        if event in ("phase", "started"):
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None)
            phase, rounds = message.get("name"), message.get("rounds")
            description = f"{name}: {phase}" if phase else name
            self._progress.update(self._tasks[name], total=rounds, description=description)
        elif event == "round" and name in self._tasks:
            self._progress.update(self._tasks[name], completed=message["round"])
        elif event in ("finished", "failed"):
            self._done += 1
            if event == "failed":
                text = f"{name}: failed: {message['reason']}"
                self._console.print(text, style="yellow", highlight=False, markup=False)
            elif not self._progress.live.is_started:
                text = f"{self._done}/{self._pending}  {name}: {message['status']}"
                self._console.print(text, highlight=False, markup=False)
            if name in self._tasks:
                self._progress.remove_task(self._tasks.pop(name))
            self._progress.update(self._all, completed=self._done)

    def ended(self) -> None:
        """Stop the progress bars, which may start again: candidates of tuning come first."""
        if self._progress.live.is_started:
            self._progress.stop()


def print_comparison(result: ComparisonResult, console: Console | None = None) -> None:
    """Print the results table of a comparison and its notes; without a console, to stdout."""
    console, results = console or Console(), result.results
    if results.unfit:
        warning = f"warning: {' '.join(unfit_sentences(results).values())}"
        print_sentence(console, warning, "yellow")
        remedy = results.remedy or OTHER_VALUES
        console.print(f"try: {remedy}", highlight=False, markup=False, soft_wrap=True)
    for part in results.by_unit:
        console.print(_table(part), markup=False)
        if part.settings.keys and not any(variant.changes for variant in part.variants):
            console.print(_settings(part.settings), markup=False)
        for table in (groups_table(part), scores_table(part)):
            if table is not None:
                print_table(console, table)
        if (baseline := baseline_note(part)) is not None:
            print_sentence(console, baseline)
        for warning in score_warnings(part):
            print_sentence(console, f"warning: {warning}", style="yellow")
    notes = (results.pair_check.statement, *notes_of(results), result.tuning.statement.strip())
    for note in notes:
        print_sentence(console, note)
    report = result.path / "comparison.html"
    console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)


def _table(results: Results) -> Table:
    """Return the table of one privacy unit's variants, with the unit's name if there are two."""
    unit = "" if results.unit is None else f", unit {results.unit}"
    facts = f"{metric_words(results.metric)}, {seeds_text(results)}, baseline {results.baseline}"
    trusts = any(variant.trust not in (None, "local") for variant in results.variants)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{results.name}: {facts}{unit}",
        title_justify="left",
        collapse_padding=trusts,  # long names fit into 80 characters
        pad_edge=not trusts,
    )
    prefix = common_words([variant.name for variant in results.variants])
    rows = [_cells(results, variant, trusts=trusts) for variant in results.variants]
    table.add_column(prefix or "variant", overflow="fold")
    for heading in rows[0]:
        table.add_column(heading, justify="right", no_wrap=True)
    for variant, cells in zip(results.variants, rows, strict=True):
        table.add_row(variant.name.removeprefix(prefix), *cells.values())
    return table


def _cells(results: Results, variant: VariantResult, *, trusts: bool) -> dict[str, str]:
    """Return the texts of a variant by the headings of their columns.

    With `trusts`, the adversary takes the place of the time: it tells the trust model.
    """
    against = f", {variant.observer}" if trusts and variant.observer else ""
    cells = {
        "guarantee, against" if trusts else "guarantee": guarantee_text(variant) + against,
        "mean": mean_text(results, variant),
        "minus baseline": minus_text(results, variant),
        "p": p_text(variant.difference and variant.difference.holm_p),
    }
    if not trusts:
        cells["time"] = seconds_text(variant.seconds)
    if not all(outcome.is_finished for outcome in results.outcomes):
        cells["seeds"] = f"{len(variant.finished_runs)}/{len(variant.outcomes)}"
    return cells


def _settings(settings: SettingsTable) -> Table:
    """Return the table of settings in which existing runs differ; few variants become columns."""
    is_wide = len(settings.values) > _MAX_COLUMNS
    rows = [("variant" if is_wide else "", *settings.keys)]
    rows += [(n, *(settings.texts[n][key] for key in settings.keys)) for n in settings.values]
    head, *others = rows if is_wide else zip(*rows, strict=True)
    table = Table(box=box.SIMPLE_HEAD, title="Settings that differ", title_justify="left")
    for heading in head:
        table.add_column(heading, overflow="fold")
    for row in others:
        table.add_row(*row)
    return table

"""The stages of a search: draw, charge, run, select, destroy. Each stage survives a crash.

| stage                         | a crash after it                                                 |
|-------------------------------|------------------------------------------------------------------|
| `drawn` is on disk            | the same number of runs with the same configurations goes on     |
| `begun` is on disk            | the run is removed, begins anew and is charged once more         |
| `done` is on disk             | the run is never repeated                                        |
| the public folder is written  | it is written again, with the same content                       |
| `selected` is on disk         | what is left of all runs is destroyed                            |

A run that fails by itself, or was changed, ends the search without a selection: the failure may
depend on private data. An interruption from outside does not end the search.
"""

import math
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import fedsim
from fedsim.accountant.ledger.journal import FileJournal, total_of
from fedsim.cli.options import print_json
from fedsim.comparison.jobs import FINISHED, Job, default_workers, execute, lock_directory
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.metrics import metric_entry
from fedsim.report.terminal import print_sentence
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.manifest import changed_files, read_manifest
from fedsim.tools.search.ledger import (
    MARKER,
    Begun,
    Done,
    Drawn,
    Search,
    SearchLedger,
    SearchPlan,
    Selected,
    Withdrawn,
    check_search_directory,
    destroy_runs,
    public_folder,
    run_folder,
    write_marker,
)
from fedsim.tools.search.outputs import account_json, digests_of, write_account, write_selected
from fedsim.tools.search.plan import SearchError, is_within, plan_search


class SearchWithdrawnError(FedsimError, RuntimeError):
    """Error of a search that ended without a model; all of its runs stay charged."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: its directory, and the folder of the selected model.

    Attributes:
        path: directory of the search, which reveals the number of runs.
        selected: folder of the selected model, which may be published.
        variant: name of the selected candidate; None if no run was drawn.
        account: content of `account/comparison.json`, for the server and the clients.
    """

    path: Path
    selected: Path
    variant: str | None
    account: Mapping[str, Any] = field(repr=False)

    @property
    def statement(self) -> tuple[str, ...]:
        """Sentences with both guarantees, each with the adversary against whom it holds."""
        return tuple(self.account["statement"])


def search(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
) -> SearchResult:
    """Perform the search of a comparison file with `select.search`, and return its selected model.

    Guarantee: the number of runs is drawn once and charged before the first run. It is never drawn
    again, and no drawn run is left out, or else no selection is claimed. A second call in `out`
    continues an interrupted search, or returns a finished one. If the file was changed after a
    finished search, the call starts another search, and the charges of both add up.

    Args:
        source: path of a comparison file, or its content as a mapping.
        out: the output directory; default `runs/<name>-search`.
        workers: number of parallel runs; default: one per processor, at most 16.

    Raises:
        ExperimentError: the file, its base or a variant has mistakes; the error lists all.
        SearchError: the candidates cannot be searched, or `out` holds another unfinished search.
        SearchWithdrawnError: a run failed, so the search ended without a model.
        RunDirectoryError: `out` contains other files, or another search is running in it.
        SearchLedgerError: the ledger in `out` was changed.
        KeyboardInterrupt: the user interrupted; the same call continues the search.
        ValueError: `workers` is below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    comparison = load_comparison(source, search=True)
    directory = Path(out) if out is not None else Path("runs") / f"{comparison.name}-search"
    check_search_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / MARKER).exists():
        write_marker(comparison, directory)
    with lock_directory(directory) as locks:
        return _SearchRun(comparison, directory, workers or default_workers(), locks).perform()


class _SearchRun:
    """One call of `search` in its locked directory."""

    def __init__(
        self, comparison: LoadedComparison, out: Path, workers: int, locks: tuple[int, ...]
    ) -> None:
        self._comparison, self._out = comparison, out
        self._workers, self._locks = workers, locks
        self._ledger = SearchLedger(out)

    def perform(self) -> SearchResult:
        """Continue an unfinished search, return a finished one, or start a search."""
        plan = plan_search(self._comparison)
        before = self._ledger.searches
        if before and before[-1].end is None:
            if before[-1].drawn.digest != plan.digest:
                raise SearchError(
                    f"{self._out} holds search {len(before)}, which has not ended, and the file, "
                    "its data, a plug-in or the version of fedsim changed since: restore what it "
                    "began with and run it again, or choose another --out; its runs stay charged"
                )
        elif before and before[-1].drawn.digest == plan.digest:
            return self._conclude()
        else:
            destroy_runs(self._out)
            write_marker(self._comparison, self._out)
            self._draw(plan, len(before) + 1)
        while self._current.pending:
            self._run(self._current.pending[: self._workers])
        self._select_best()
        return self._conclude()

    @property
    def _current(self) -> Search:
        return self._ledger.searches[-1]

    def _draw(self, plan: SearchPlan, number: int) -> None:
        """Draw the number of runs and their configurations, and charge all of them."""
        if number > 1 and self._current.drawn.data != plan.data:
            raise SearchError(
                f"{self._out} holds searches of other data, or whose digests have another user's "
                "key, with which this one cannot add up; choose another --out"
            )
        runs, candidates = plan.run_counts.draw(), len(plan.candidates)
        drawn = Drawn(
            **dict(plan),
            search=number,
            fedsim=fedsim.__version__,
            nonce=secrets.token_hex(32),
            configurations=[secrets.randbelow(candidates) for _ in range(runs)],
        )
        self._ledger.append(drawn)

    def _run(self, runs: Sequence[int]) -> None:
        """Execute runs in parallel; each is recorded as begun before it starts."""
        current, drawn = self._current, self._current.drawn
        if not current.done and not current.attempts:
            destroy_runs(self._out)
        folders = [run_folder(self._out, drawn.search, run) for run in runs]
        messages, failures = list[dict[str, Any]](), list[str]()
        for run, folder in zip(runs, folders, strict=True):
            attempt = current.attempts.get(run, 0) + 1
            self._ledger.append(Begun(search=drawn.search, run=run, attempt=attempt))
            if folder.exists():
                shutil.rmtree(folder)
            one = self._comparison.candidates[drawn.configurations[run]]
            key = one.name, one.experiment.seed, one.loaded, folder, drawn.digest
            messages.append({**Job(*key, "run", measure=False).to_message(), "report": False})

        def on_message(index: int, message: Mapping[str, Any]) -> None:
            if failure := self._end_run(runs[index], folders[index], message):
                failures.append(failure)

        log = folders[0].parent / "workers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        execute(messages, workers=len(runs), log=log, on_message=on_message, inherited=self._locks)
        if failures:  # only now: no process writes any more
            self._withdraw(failures[0])

    def _end_run(self, run: int, folder: Path, message: Mapping[str, Any]) -> str | None:
        """Record the end of a run; return why the search cannot continue, or None."""
        if message["event"] not in ("finished", "failed"):
            return None
        status = message.get("status", "failed")
        if status == "interrupted":
            raise KeyboardInterrupt
        if status not in FINISHED:
            return f"a run failed: {message.get('reason', status)}"
        if not self._is_charged(folder):
            return "a run spent something else than its charge"
        directory = RunDirectory(folder)
        if directory.read_inputs()["data"] != self._current.drawn.data:
            return "the data changed since the runs were drawn"
        root = read_manifest(directory).root
        self._ledger.append(Done(search=self._current.drawn.search, run=run, root=root))
        return None

    def _is_charged(self, folder: Path) -> bool:
        charges = self._current.drawn.clients
        spent = FileJournal(folder / "ledger.jsonl").histories()
        known = spent.keys() <= {charge.client for charge in charges}
        return known and all(is_within(total_of(spent.get(c.client, ())), c) for c in charges)

    def _select_best(self) -> None:
        """Publish the best run, the earliest one if several are equal, and end the search."""
        current, drawn = self._current, self._current.drawn
        paths = [run_folder(self._out, drawn.search, run) for run in range(drawn.runs)]
        directories = [RunDirectory(path) for path in paths]
        for run, directory in enumerate(directories):
            if not _is_unchanged(directory, current.done[run]):
                self._withdraw("a run that had ended was changed or removed")
        scores = [one.read_json("summary.json").get(drawn.metric) for one in directories]
        path = score = variant = None
        if scores:
            sign = -1.0 if metric_entry(drawn.metric).smaller_is_better else 1.0
            known = [-math.inf if one is None else sign * one for one in scores]  # None: infinite
            best = known.index(max(known))
            path, score = paths[best], scores[best]
            variant = drawn.candidates[drawn.configurations[best]]
        end = Selected(search=drawn.search, variant=variant, files={})
        searches = (*self._ledger.searches[:-1], replace(current, end=end))
        write_selected(self._out, searches, path, score=score)
        files = digests_of(public_folder(self._out, drawn.search))
        self._ledger.append(end.model_copy(update={"files": files}))

    def _withdraw(self, reason: str) -> None:
        """End the search permanently without a model."""
        self._ledger.append(Withdrawn(search=self._current.drawn.search, reason=reason))
        self._conclude()

    def _conclude(self) -> SearchResult:
        """Destroy all runs, write the account and return the result of an ended search."""
        destroy_runs(self._out)
        searches = self._ledger.searches
        content = account_json(searches, name=self._comparison.name, head=self._ledger.head)
        write_account(content, self._out)
        end = searches[-1].end
        if isinstance(end, Withdrawn):
            raise SearchWithdrawnError(
                f"search {len(searches)} ended without a model ({end.reason}): no selection is "
                "claimed, and all of its runs are charged; a new search here needs a change of the "
                "file, and adds to them"
            )
        folder = public_folder(self._out, len(searches))
        return SearchResult(self._out, folder, searches[-1].selected, content)


def _is_unchanged(directory: RunDirectory, root: str) -> bool:
    try:
        manifest = read_manifest(directory)
    except RunDirectoryError:
        return False
    return manifest.root == root and not list(changed_files(directory, manifest))


def perform(file: str, *, out: str | None, workers: int | None, quiet: bool, as_json: bool) -> None:
    """Perform the search of a comparison file; print the result and what may be published."""
    if not quiet:
        click.echo("searching; the number of runs is secret, so no progress is shown", err=True)
    try:
        result = search(file, out=out, workers=workers)
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command again to continue", err=True)
        raise
    if as_json:
        print_json({**result.account, "path": str(result.path), "folder": str(result.selected)})
        return
    console, name = Console(), result.variant
    chosen = "no run was drawn, so nothing is selected" if name is None else f"selected: {name}"
    print_sentence(console, f"{result.account['name']}: {chosen}", style="bold")
    for sentence in (
        *result.statement,
        f"hand on nothing but {result.selected}",
        f"keep {result.path / 'account'}, and what was printed here, with the server: both tell "
        "the number of runs",
    ):
        print_sentence(console, sentence)

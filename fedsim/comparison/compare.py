"""Run a comparison: from a file to a directory with all runs and their comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.execution.jobs import MARKER, Job, check_directory, lock_directory, plan_jobs
from fedsim.comparison.execution.workers import default_workers, execute
from fedsim.comparison.file.arms import arm_notes
from fedsim.comparison.file.load import LoadedComparison, load_comparison
from fedsim.comparison.file.vary import Vary, load_varied
from fedsim.comparison.files import write_comparison, write_settings
from fedsim.comparison.outcomes import read_outcome
from fedsim.comparison.page import write_page
from fedsim.comparison.results import summarise
from fedsim.comparison.terminal import notebook_comparison
from fedsim.comparison.tuning import tuning_cost
from fedsim.experiment.overrides import Overrides

DEFAULT_SEEDS = 5
"""Seeds of a comparison of varied values, where none are given."""


class ComparisonObserver(Protocol):
    """An observer of a comparison's progress, such as the terminal."""

    def planned(self, comparison: LoadedComparison, jobs: list[Job], workers: int) -> None:
        """Called when every variant is known to be valid, before the first run."""
        ...

    def worker_message(self, job: Job, message: Mapping[str, Any]) -> None:
        """Called with each message of a worker: `started`, `round`, `finished` or `failed`."""
        ...

    def ended(self) -> None:
        """Called once after the last run."""
        ...


def compare(
    source: str | Path | Mapping[str, Any],
    *,
    vary: Vary | None = None,
    one_at_a_time: bool = False,
    overrides: Overrides = (),
    seeds: int | Sequence[int] | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    client_metrics: bool | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    observer: ComparisonObserver | None = None,
) -> ComparisonResult:
    """Run every variant of a comparison with every seed and return the comparison.

    Finished runs in `out` are reused if nothing that they depend on has changed. Unfinished runs
    are resumed, so a second call continues an interrupted comparison.

    Args:
        source: path of a comparison file, or its content as a mapping; with `vary` the path of an
            experiment file.
        vary: values by key, such as `{"privacy.target_epsilon": [None, 8, 2]}`: the variants are
            all combinations, and the first one is the baseline. Null noise is no privacy.
        one_at_a_time: with `vary`, whether each value is a variant by itself, with all other keys
            as in the file; the file itself is then the first variant, `base`.
        overrides: with `vary`, settings of all variants, such as `["federation.rounds=5"]`.
        seeds: number or list of seeds, in place of the file's; with `vary` by default
            `DEFAULT_SEEDS`.
        baseline: the variant that all others are compared with, in place of the file's.
        metric: the compared metric, in place of the file's.
        client_metrics: whether to evaluate the final model on every client's own data, in place of
            the file's value.
        out: the output directory; default `runs/<name>`.
        workers: number of parallel worker processes with one thread each; default: one per
            processor, at most 16.
        observer: receives the progress of every run; None: a notebook shows it.

    Raises:
        ExperimentError: the file, its base or a variant is wrong; it lists every mistake.
        ComparisonError: the runs do not have the metric to compare.
        NothingFinishedError: every run failed.
        KeyboardInterrupt: the user stopped it before any run was finished.
        RunDirectoryError: `out` holds something else, or another comparison is running in it.
        ValueError: `workers` is below 1, or `overrides` or `one_at_a_time` are given without
            `vary`.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    given = {
        "seeds": list(seeds) if isinstance(seeds, Sequence) else seeds,
        "baseline": baseline,
        "metric": metric,
        "client_metrics": client_metrics,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    comparison = _load(source, vary, overrides, changes, one_at_a_time=one_at_a_time)
    observer = observer or notebook_comparison()
    directory = Path(out) if out is not None else Path("runs") / comparison.name
    check_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_settings(comparison, directory / MARKER)
    with lock_directory(directory) as locks:
        jobs = plan_jobs(comparison, directory)
        failures, interrupted = _run(comparison, jobs, directory, workers, locks, observer)
        return _conclude(comparison, jobs, directory, failures, interrupted)


def _load(
    source: str | Path | Mapping[str, Any],
    vary: Vary | None,
    overrides: Overrides,
    changes: Mapping[str, object],
    *,
    one_at_a_time: bool,
) -> LoadedComparison:
    if vary:
        if isinstance(source, Mapping):
            raise ValueError("vary needs the path of an experiment file, got a mapping")
        return load_varied(
            source,
            vary,
            overrides=overrides,
            one_at_a_time=one_at_a_time,
            changes={"seeds": DEFAULT_SEEDS, **changes},
        )
    if one_at_a_time:
        raise ValueError(
            "one_at_a_time belongs to vary; a variant of a file has a key of that name"
        )
    if overrides:
        raise ValueError(
            "overrides belong to vary; the variants of a comparison file have their own settings"
        )
    if isinstance(source, Mapping):
        return load_comparison({**source, **changes})
    return load_comparison(source, changes=changes)


def _conclude(
    comparison: LoadedComparison,
    jobs: list[Job],
    directory: Path,
    failures: Mapping[int, str],
    interrupted: bool,
) -> ComparisonResult:
    """Return the result and write its files."""
    outcomes = [read_outcome(job, directory, failures.get(index)) for index, job in enumerate(jobs)]
    if interrupted and not any(outcome.is_finished for outcome in outcomes):
        raise KeyboardInterrupt
    results = summarise(comparison, outcomes)
    arms = {one.name: one.arm for one in comparison.variants if one.arm is not None}
    results = replace(results, remarks=(*results.remarks, *arm_notes(arms)))
    tuning = tuning_cost(results, directory, comparison.settings.select)
    result = ComparisonResult(directory, results, tuning, interrupted)
    write_comparison(result)
    write_page(result)
    return result


def _run(
    comparison: LoadedComparison,
    jobs: list[Job],
    directory: Path,
    workers: int | None,
    locks: tuple[int, ...],
    observer: ComparisonObserver | None,
) -> tuple[dict[int, str], bool]:
    """Run the pending jobs; return the reasons of failures and whether the user interrupted."""
    pending = [index for index, job in enumerate(jobs) if job.is_pending]
    count = min(workers or default_workers(), max(len(pending), 1))
    failures: dict[int, str] = {}
    if observer is not None:
        observer.planned(comparison, jobs, count)

    def on_message(number: int, message: Mapping[str, Any]) -> None:
        index = pending[number]
        if message["event"] == "failed":
            failures[index] = message["reason"]
        if observer is not None:
            observer.worker_message(jobs[index], message)

    messages = [jobs[index].to_message() for index in pending]
    try:
        log = directory / "workers.log"
        execute(messages, workers=count, log=log, on_message=on_message, inherited=locks)
    except KeyboardInterrupt:
        return failures, True
    finally:
        if observer is not None:
            observer.ended()
    return failures, False

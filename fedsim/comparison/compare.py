"""Run a comparison: from a file to a directory with every run and what they show together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.files import write_comparison, write_settings
from fedsim.comparison.jobs import MARKER, Job, alone_in, plan_jobs, refuse_foreign
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.comparison.outcomes import read_outcome
from fedsim.comparison.page import write_page
from fedsim.comparison.results import summarise
from fedsim.comparison.tuning import tuning_cost
from fedsim.comparison.workers import default_workers, execute


class ComparisonObserver(Protocol):
    """Somebody who watches a comparison, such as the terminal."""

    def planned(self, comparison: LoadedComparison, jobs: list[Job], workers: int) -> None:
        """Called when every variant is known to be valid, before the first run."""
        ...

    def news(self, job: Job, message: Mapping[str, Any]) -> None:
        """Called with each message of a worker: `started`, `round`, `finished` or `failed`."""
        ...

    def ended(self) -> None:
        """Called once when no run will follow."""
        ...


def compare(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    observer: ComparisonObserver | None = None,
) -> ComparisonResult:
    """Run every variant of a comparison with every seed and return what differs.

    Finished runs in `out` are reused when nothing that they depend on has changed, unfinished ones
    are resumed, so calling it again continues an interrupted comparison.

    Args:
        source: path of a comparison file, or its content as a mapping.
        out: the directory; default `runs/<name>`.
        workers: processes that run at the same time, each on one thread; default: one for each
            processor.
        observer: is told of every run.

    Raises:
        ExperimentError: the file, its base or a variant is wrong; it lists every mistake.
        ComparisonError: the runs do not have the metric that is to be compared.
        NothingFinishedError: every run failed.
        KeyboardInterrupt: the user stopped it before any run was finished.
        RunDirectoryError: `out` holds something else, or another comparison is running in it.
        ValueError: `workers` is below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    comparison = load_comparison(source)
    directory = Path(out) if out is not None else Path("runs") / comparison.name
    refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_settings(comparison, directory / MARKER)
    with alone_in(directory) as locks:
        jobs = plan_jobs(comparison, directory)
        failures, interrupted = _run(comparison, jobs, directory, workers, locks, observer)
        return _conclude(comparison, jobs, directory, failures, interrupted)


def _conclude(
    comparison: LoadedComparison,
    jobs: list[Job],
    directory: Path,
    failures: Mapping[int, str],
    interrupted: bool,
) -> ComparisonResult:
    """Return the result and write it down."""
    outcomes = [read_outcome(job, directory, failures.get(index)) for index, job in enumerate(jobs)]
    if interrupted and not any(outcome.finished for outcome in outcomes):
        raise KeyboardInterrupt
    results = summarise(comparison, outcomes)
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
    """Do what is left to do; return why jobs failed, and whether the user interrupted."""
    pending = [index for index, job in enumerate(jobs) if job.pending]
    count = min(workers or default_workers(), max(len(pending), 1))
    failures: dict[int, str] = {}
    if observer is not None:
        observer.planned(comparison, jobs, count)

    def news(number: int, message: Mapping[str, Any]) -> None:
        index = pending[number]
        if message["event"] == "failed":
            failures[index] = message["reason"]
        if observer is not None:
            observer.news(jobs[index], message)

    messages = [jobs[index].to_message() for index in pending]
    try:
        log = directory / "workers.log"
        execute(messages, workers=count, log=log, news=news, inherited=locks)
    except KeyboardInterrupt:
        return failures, True
    finally:
        if observer is not None:
            observer.ended()
    return failures, False

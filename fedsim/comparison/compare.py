"""Functions that run the variants of a comparison file, or that compare finished runs."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from fedsim.comparison.comparison_result import ComparisonResult, write_comparison, write_settings
from fedsim.comparison.differences import Baseline, unit_problems, units_of
from fedsim.comparison.given_runs import read_variants, shared_digests
from fedsim.comparison.jobs import (
    MARKER,
    Job,
    check_directory,
    default_workers,
    execute,
    execute_here,
    lock_directory,
    plan_jobs,
)
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.comparison.outcomes import read_outcome, read_run
from fedsim.comparison.page import render_comparison
from fedsim.comparison.results import ComparisonError, Results, summarise
from fedsim.comparison.runs_cost import TUNING, cost_of_tuned, tuning_cost, tuning_of_runs
from fedsim.comparison.terminal import ComparisonProgress
from fedsim.comparison.variants import arm_notes
from fedsim.comparison.vary import Vary, load_candidates, load_varied, tuned_comparison
from fedsim.experiment.errors import did_you_mean
from fedsim.experiment.overrides import Overrides
from fedsim.report.progress import notebook_console
from fedsim.runs.directory import RunDirectory

_RATE = "local.optimizer.lr"


class ComparisonCallback(Protocol):
    """Protocol of an object that shows the progress of a comparison, such as progress bars."""

    def planned(self, comparison: LoadedComparison, jobs: list[Job], workers: int) -> None:
        """Called before the first run, with a job for each run and the number of processes."""

    def worker_message(self, job: Job, message: Mapping[str, Any]) -> None:
        """Called with each message of a job: `started`, `round`, `finished` or `failed`."""

    def ended(self) -> None:
        """Stop showing progress; called once, after the last run of the comparison."""


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
    tune: Mapping[str, Sequence[object] | None] | None = None,
    tune_on: str | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    callback: ComparisonCallback | None = None,
) -> ComparisonResult:
    """Run every variant of a comparison with every seed and return the compared results.

    Finished runs in `out` are reused if nothing that they depend on has changed. Unfinished runs
    are resumed, so a second call continues an interrupted comparison.

    Args:
        source: path of a comparison file, or its content as a mapping (whose `base` is the path or
            the content of an experiment). With `vary`, the source is an experiment, as `fedsim.run`
            takes it.
        vary: lists of values by key, such as `{"privacy.target_epsilon": [None, 8, 2]}`, where None
            means no privacy. The variants are all combinations of values; the first is the
            baseline.
        one_at_a_time: with `vary`, whether a variant changes only one key to one value; the
            unchanged file is then the first variant, `base`.
        overrides: settings of the experiment for all variants, such as `["federation.rounds=5"]`.
        seeds: number of seeds or list of seeds, replacing those of the file; with `vary`, the
            default is 5.
        baseline: name of the variant that all others are compared with, replacing that of the file.
        metric: name of the compared metric, replacing that of the file.
        client_metrics: whether to evaluate the final model on every client's own data, replacing
            the value in the file.
        tune: values by key, such as `{"local.optimizer.lr": [0.1, 1]}`. Each variant is tuned
            separately over these values before the comparison. None instead of a list means 1/16,
            1/4, 1, 4 and 16 times the variant's own value. Replaces `tune` of the file.
        tune_on: with `tune`, the data to tune on: `public_test` (default; only the test set is
            public, so the tuning runs are charged), or `public_data` (all examples are declared
            public).
        out: the output directory; default `runs/<name>`.
        workers: number of parallel worker processes with one thread each; default: one per
            processor, at most 16. Experiments with Python objects run one after another in this
            process.
        callback: callback for the progress of the runs; with None, a notebook shows progress bars,
            and a script shows nothing.

    Raises:
        ExperimentError: the file, its base or a variant has mistakes; the error lists all.
        ComparisonError: the runs do not have the metric to compare.
        NothingFinishedError: no run finished.
        KeyboardInterrupt: the user interrupted before any run was finished.
        RunDirectoryError: `out` contains other files, or another comparison is running in it.
        ValueError: `workers` is below 1, `one_at_a_time` is given without `vary`, or `tune_on`
            without `tune`.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if one_at_a_time and not vary:
        raise ValueError(
            "one_at_a_time belongs to vary; a variant of a file has a key of that name"
        )
    if tune_on is not None and not tune:
        raise ValueError("tune_on needs tune, the keys to tune")
    given = {
        "seeds": list(seeds) if isinstance(seeds, Sequence) else seeds,
        "baseline": baseline,
        "metric": metric,
        "client_metrics": client_metrics,
        "tune": {"keys": tune, **({"on": tune_on} if tune_on else {})} if tune else None,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    if vary:
        comparison = load_varied(
            source, vary, overrides=overrides, one_at_a_time=one_at_a_time, changes=changes
        )
    else:
        comparison = load_comparison(source, changes=changes, overrides=overrides)
    directory = Path(out) if out is not None else Path("runs") / comparison.name
    console = notebook_console() or Console(quiet=True, force_terminal=False)
    return _perform(comparison, directory, workers, callback or ComparisonProgress(console))


def _perform(
    comparison: LoadedComparison,
    directory: Path,
    workers: int | None,
    callback: ComparisonCallback,
    chosen: Mapping[str, str] | None = None,
) -> ComparisonResult:
    """Run the unfinished jobs of a comparison, write its files and return the result.

    If the comparison tunes, its candidates run first, as another comparison with an empty `chosen`;
    then `chosen` has the values of the tuned variants.
    """
    tune = comparison.settings.tune
    candidates = None if tune is None else load_candidates(comparison, tune)
    check_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_settings(comparison, directory / MARKER)
    with lock_directory(directory) as locks:
        if candidates is not None:
            tried = _perform(candidates[0], directory / TUNING, workers, callback, {})
            if tried.interrupted:
                raise KeyboardInterrupt
            comparison, chosen = tuned_comparison(comparison, candidates, tried.results)
        jobs = plan_jobs(comparison, directory)
        failures, interrupted = _run(comparison, jobs, directory, workers, locks, callback)
        outcomes = [read_outcome(job, directory, failures.get(job.directory)) for job in jobs]
        if interrupted and not any(outcome.is_finished for outcome in outcomes):
            raise KeyboardInterrupt
        results = summarise(
            comparison.name,
            outcomes,
            metric=comparison.settings.metric,
            baseline=comparison.baseline,
            seeds=comparison.seeds,
            settings={variant.name: variant.settings for variant in comparison.variants},
            changes={variant.name: variant.changes for variant in comparison.variants},
            remarks=arm_notes({variant.name: variant.arm for variant in comparison.variants}),
        )
        if chosen is None:
            results = replace(results, remedy=_remedy(comparison, results, directory))
        if tune is not None and chosen:
            tuning = cost_of_tuned(results, directory, tune, chosen)
        else:
            tuning = tuning_cost(results, directory, comparison.settings.select)
        return _written(ComparisonResult(directory, results, tuning, interrupted))


def _written(result: ComparisonResult) -> ComparisonResult:
    """Write all files of a comparison but its settings, and return the result."""
    write_comparison(result)
    RunDirectory(result.path).write_text("comparison.html", render_comparison(result))
    return result


def _remedy(comparison: LoadedComparison, results: Results, directory: Path) -> str | None:
    """Return the command that tunes every variant; None if none is unfit, or it does not apply."""
    has_rates = all(_RATE in variant.settings for variant in comparison.variants)
    if not results.unfit or not has_rates or comparison.settings.select is not None:
        return None
    if isinstance(comparison.written_base, Mapping):  # no file can be named
        return f"fedsim.compare(..., tune={{{_RATE!r}: None}})"
    place = shlex.quote(str(directory))
    return f"fedsim compare {place}/{MARKER} --tune {_RATE} --out {place}"


def _run(
    comparison: LoadedComparison,
    jobs: list[Job],
    directory: Path,
    workers: int | None,
    locks: tuple[int, ...],
    callback: ComparisonCallback,
) -> tuple[dict[Path, str], bool]:
    """Run the pending jobs; return (failure reasons by directory, whether the user interrupted)."""
    pending = [job for job in jobs if job.is_pending]
    here = any(job.loaded.experiment.objects for job in pending)
    count = 1 if here else min(workers or default_workers(), max(len(pending), 1))
    failures: dict[Path, str] = {}
    callback.planned(comparison, jobs, count)

    def on_message(number: int, message: Mapping[str, Any]) -> None:
        if message["event"] == "failed":
            failures[pending[number].directory] = message["reason"]
        callback.worker_message(pending[number], message)

    perform = execute_here if here else partial(execute, workers=count, inherited=locks)
    log = directory / "workers.log"
    try:
        perform([job.to_message() for job in pending], log=log, on_message=on_message)
    except KeyboardInterrupt:
        return failures, True
    finally:
        callback.ended()
    return failures, False


_NAMED = 3
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]+")


def compare_runs(
    runs: Sequence[str | Path],
    *,
    baseline: str | None = None,
    metric: str | None = None,
    out: str | Path | None = None,
) -> ComparisonResult:
    """Compare existing, finished runs and return the compared results.

    Runs that differ only in the seed form one variant. The directory of an earlier comparison
    stands for all runs in it.

    Args:
        runs: paths of run directories, at least two.
        baseline: name of the variant that the others are compared with; default: the variant of the
            first run.
        metric: the compared metric, such as `test_loss`; default: the first run's main metric, or
            else accuracy, R² or loss, if all runs have it.
        out: the output directory, which is new, empty, or that of an earlier comparison of runs;
            default: `runs/A-vs-B`, where A and B are names of variants.

    Raises:
        RunDirectoryError: a directory contains no run, or `out` contains other files.
        ComparisonError: a run fails verification, or the runs cannot be compared: they have
            different test sets or no common metric, or the baseline does not exist.
        ExperimentError: `experiment.yaml` of a run is not valid for this version.
    """
    variants, left_out = read_variants([Path(run) for run in runs])
    directory = Path(out) if out is not None else Path("runs") / _directory_name(list(variants))
    check_directory(directory, of_runs=True)
    outcomes = [
        read_run(run.path, directory, run.experiment, variant, shared_digests(run))
        for variant, runs in variants.items()
        for run in runs
    ]
    results = summarise(
        directory.name,
        outcomes,
        metric=metric,
        baseline=_baseline({run.variant: run.unit for run in outcomes}, baseline),
        seeds=tuple(sorted({run.seed for run in outcomes})),
        settings={name: runs[0].settings for name, runs in variants.items()},
        remarks=left_out,
    )
    paths = [run.path for runs in variants.values() for run in runs]
    tuning = tuning_of_runs(results, paths)
    directory.mkdir(parents=True, exist_ok=True)
    # It lists the runs, so that the directory stands for them.
    content = {
        "name": results.name,
        "metric": metric,
        "baseline": results.baseline,
        "variants": {
            name: {run.experiment.seed: str(run.path) for run in runs}
            for name, runs in variants.items()
        },
        "runs": [str(path.resolve()) for path in paths],
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    RunDirectory(directory).write_text(MARKER, text)
    return _written(ComparisonResult(directory, results, tuning, interrupted=False))


def _baseline(units: Mapping[str, str | None], asked: str | None) -> Baseline:
    """Return the baseline, or the baseline of each privacy unit if the variants have two units."""
    if asked is not None and asked not in units:
        hint = did_you_mean(asked, units) or f"; there are {', '.join(units)}"
        raise ComparisonError(f"there is no variant {asked!r}{hint}")
    first = asked or next(iter(units))
    kinds = units_of(units)
    baseline: Baseline = first
    if len(kinds) > 1 and units[first] is not None:
        baseline = {kind: next(n for n in (first, *units) if units[n] == kind) for kind in kinds}
    if problems := [message for _, message in unit_problems(units, baseline)]:
        raise ComparisonError(
            "the runs have two units of privacy, whose ε cannot be compared; compare the runs of "
            f"each unit apart ({problems[0]})"
        )
    return baseline


def _directory_name(names: Sequence[str]) -> str:
    text = "-vs-".join(_NOT_IN_NAMES.sub("_", name) for name in names[:_NAMED])
    if len(names) > _NAMED:
        return f"{text}-and-{len(names) - _NAMED}-more"
    return text if len(names) > 1 else f"{text}-seeds"

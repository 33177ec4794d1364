"""Compare run directories that exist, without running anything."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.execution.jobs import MARKER
from fedsim.comparison.files import write_comparison
from fedsim.comparison.finished.given_runs import (
    GivenVariant,
    find_runs,
    group_runs,
    read_given,
    shared_digests,
    test_set_problems,
)
from fedsim.comparison.outcomes import RunOutcome, read_run
from fedsim.comparison.page import write_page
from fedsim.comparison.results import ComparisonError, summarise
from fedsim.comparison.tuning import tuning_of_runs
from fedsim.comparison.units import Baseline, unit_problems
from fedsim.experiment.errors import did_you_mean
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import read_yaml_object

_NAMED = 3
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]+")


@dataclass(frozen=True)
class GivenComparison:
    """The variants of given runs."""

    name: str
    metric: str | None
    baseline: Baseline
    seeds: tuple[int, ...]
    variants: tuple[GivenVariant, ...]


def compare_runs(
    runs: Sequence[str | Path],
    *,
    baseline: str | None = None,
    metric: str | None = None,
    out: str | Path | None = None,
) -> ComparisonResult:
    """Compare finished runs by their directories and return the comparison.

    Runs that differ in the seed alone are one variant with its seeds. A directory of a comparison
    stands for all its runs.

    Args:
        runs: run directories, at least two.
        baseline: name of the variant that the others are compared with; default: the variant of
            the first run.
        metric: the compared metric, such as `test_loss`; default: accuracy, else R², else the loss.
        out: the output directory, new, empty, or of an earlier comparison of runs; default:
            `runs/A-vs-B` of the variants' names.

    Raises:
        RunDirectoryError: a directory holds no run, or `out` holds something else.
        ComparisonError: a run is not sound, or the runs cannot be compared: other test sets, no
            common metric, no such baseline.
        ExperimentError: `experiment.yaml` of a run is not what this version writes.
    """
    found, left_out = read_given(find_runs([Path(run) for run in runs]))
    if len(found) < 2:
        raise ComparisonError("\n".join([*left_out, "name at least two finished runs to compare"]))
    variants, repeated = group_runs(found)
    problems = list(test_set_problems(variants))
    if problems:
        raise ComparisonError("\n".join(problems))
    names = [one.name for one in variants]
    directory = Path(out) if out is not None else Path("runs") / _directory_name(names)
    _prepare(directory)
    comparison = GivenComparison(
        name=directory.name,
        metric=metric,
        baseline=_baseline(variants, baseline),
        seeds=tuple(sorted({run.seed for one in variants for run in one.runs})),
        variants=variants,
    )
    results = summarise(comparison, list(_outcomes(variants, directory)))
    results = replace(results, remarks=(*left_out, *repeated))
    paths = [run.path for one in variants for run in one.runs]
    result = ComparisonResult(directory, results, tuning_of_runs(results, paths), False)
    directory.mkdir(parents=True, exist_ok=True)
    _write_settings(comparison, directory)
    write_comparison(result)
    write_page(result)
    return result


def _outcomes(variants: Sequence[GivenVariant], directory: Path) -> Sequence[RunOutcome]:
    return [
        read_run(
            run.directory,
            experiment=run.experiment,
            variant=one.name,
            path=Path(os.path.relpath(run.path, directory)).as_posix(),
            pair_digests=shared_digests(run),
        )
        for one in variants
        for run in one.runs
    ]


def _baseline(variants: Sequence[GivenVariant], asked: str | None) -> Baseline:
    """Return the baseline, or one for each unit: the first variant without privacy or of the unit.

    Raises:
        ComparisonError: there is no such variant, or variants have no baseline in their unit.
    """
    units = {one.name: one.unit for one in variants}
    if asked is not None and asked not in units:
        hint = did_you_mean(asked, units) or f"; there are {', '.join(units)}"
        raise ComparisonError(f"there is no variant {asked!r}{hint}")
    first = asked or next(iter(units))
    kinds = list(dict.fromkeys(unit for unit in units.values() if unit is not None))
    baseline: Baseline = first
    if len(kinds) > 1 and units[first] is not None:
        baseline = {
            kind: first
            if units[first] == kind
            else next(name for name, own in units.items() if own == kind)
            for kind in kinds
        }
    problems = [message for _, message in unit_problems(units, baseline)]
    if problems:
        raise ComparisonError(
            "the runs have two units of privacy, whose ε cannot be compared; compare the runs of "
            f"each unit apart ({problems[0]})"
        )
    return baseline


def _directory_name(names: Sequence[str]) -> str:
    shown = [_NOT_IN_NAMES.sub("_", name) for name in names[:_NAMED]]
    more = len(names) - len(shown)
    text = "-vs-".join(shown) + (f"-and-{more}-more" if more else "")
    return text if len(names) > 1 else f"{text}-seeds"


def _prepare(directory: Path) -> None:
    """Check that the output directory is new, empty or of an earlier comparison of runs.

    Raises:
        RunDirectoryError: it holds something else.
    """
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"{directory} is a file; choose another --out")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    marker = directory / MARKER
    if not marker.is_file() or "runs" not in read_yaml_object(marker):
        raise RunDirectoryError(
            f"{directory} is not empty and holds no comparison of runs; choose another --out"
        )


def _write_settings(comparison: GivenComparison, directory: Path) -> None:
    """Write `comparison.yaml`, which names the runs: the directory then stands for them."""
    content = {
        "name": comparison.name,
        "metric": comparison.metric,
        "baseline": comparison.baseline
        if isinstance(comparison.baseline, str)
        else dict(comparison.baseline),
        "variants": {
            one.name: {run.seed: str(run.path) for run in one.runs} for one in comparison.variants
        },
        "runs": [str(run.path.resolve()) for one in comparison.variants for run in one.runs],
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    RunDirectory(directory).write_text(MARKER, text)

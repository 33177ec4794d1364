"""Functions that check and read existing run directories, and group the runs into variants.

Runs that differ only in the seed form one variant. Scores on different test sets are not compared.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.comparison.differences import (
    SettingsTable,
    compared_settings,
    participants_digest,
    setting_text,
    settings_table,
)
from fedsim.comparison.jobs import FINISHED, MARKER
from fedsim.comparison.results import ComparisonError
from fedsim.comparison.text import common_prefix
from fedsim.experiment import ExperimentWithClients, read_settings
from fedsim.federation.schedule import participation_of
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import find_object, read_object
from fedsim.runs.inputs import have_one_key
from fedsim.runs.verification import verify_run

_EXPERIMENT = "experiment.yaml"  # of every run
_MAX_UNSOUND = 10  # runs that are named
# Digests in `checkpoint/inputs.json` that are not of plug-ins.
_NO_PLUGIN = ("data", "test", "model", "privacy")


@dataclass(frozen=True)
class GivenRun:
    """A finished run that passed verification."""

    path: Path  # as the user gave it
    experiment: ExperimentWithClients
    settings: dict[str, object]  # with the version of fedsim and digests of plug-ins
    inputs: dict[str, str]  # from `checkpoint/inputs.json`


# Variants by name: the runs of a variant differ only in the seed.
GivenVariants = Mapping[str, tuple[GivenRun, ...]]


def read_variants(paths: Sequence[Path]) -> tuple[GivenVariants, list[str]]:
    """Return the variants of the runs that the paths name or contain, and why runs are left out.

    Raises:
        RunDirectoryError: a directory contains no run.
        ComparisonError: runs fail verification, have different test sets, or are fewer than two.
    """
    found: dict[Path, Path] = {}
    for run in (run for path in paths for run in _runs_of(path)):
        found.setdefault(run.resolve(), run)
    given, left_out = read_given(list(found.values()))
    if len(given) < 2:
        raise ComparisonError("\n".join([*left_out, "name at least two finished runs to compare"]))
    variants, repeated = group_runs(given)
    if problems := list(_test_set_problems(variants)):
        raise ComparisonError("\n".join(problems))
    return variants, [*left_out, *repeated]


def _runs_of(path: Path) -> list[Path]:
    """Return the runs at a path: itself, those of a comparison, or those in subdirectories."""
    if not path.is_dir():
        problem = "is a file; name run directories alone" if path.exists() else "does not exist"
        raise RunDirectoryError(f"{path} {problem}")
    is_comparison = (path / MARKER).is_file()
    named = read_object(path / MARKER).get("runs") if is_comparison else None
    if isinstance(named, list):
        return [Path(str(run)) for run in named]
    if not is_comparison and (path / _EXPERIMENT).is_file():
        return [path]
    files = path.glob(f"{'runs/*/*' if is_comparison else '*'}/{_EXPERIMENT}")
    inside = sorted(file.parent for file in files if file.is_file())
    return inside if inside or is_comparison else [path]


def read_given(paths: Sequence[Path]) -> tuple[list[GivenRun], list[str]]:
    """Return the finished runs in the given directories, and a sentence for each unfinished run.

    Guarantee: every returned run passes `fedsim verify`; only pages, such as `report.html`, are not
    checked.

    Raises:
        ComparisonError: runs fail verification; the message names the first ones.
    """
    runs: list[GivenRun] = []
    left_out: list[str] = []
    unsound: list[str] = []
    for path in paths:
        directory = RunDirectory.open(path)
        status = find_object(path / "summary.json").get("status", "unfinished")
        if status not in FINISHED:
            left_out.append(f"{path} is left out: the run is {status}.")
        elif problems := list(verify_run(directory, pages=False).problems):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            unsound.append(f"{path}: {problems[0]}{more}")
        else:
            experiment, inputs = read_settings(path / _EXPERIMENT), directory.read_inputs()
            plugins = {name: text[:12] for name, text in inputs.items() if name not in _NO_PLUGIN}
            settings = {**compared_settings(experiment), "fedsim": directory.read_version()}
            runs.append(GivenRun(path, experiment, {**settings, **plugins}, inputs))
    if unsound:
        head = "a run that `fedsim verify` does not find sound cannot be compared:"
        more = len(unsound) - _MAX_UNSOUND
        tail = [f"and {more} more runs"] if more > 0 else []
        raise ComparisonError("\n".join([head, *unsound[:_MAX_UNSOUND], *tail]))
    return runs, left_out


_MAX_NAME_CHARACTERS = 60
_SEED_ENDING = re.compile(r"[-_.=]*(seed|s)?[-_.=]*\Z")
_SEED_DIRECTORY = re.compile(r"(seed|s)?[-_.=]*\d+\Z")


def group_runs(runs: Sequence[GivenRun]) -> tuple[GivenVariants, list[str]]:
    """Return the variants in the order of their first runs, and a sentence for each repeated run.

    A repeated run, with the same seed, is left out. With other data, it raises a ComparisonError.
    """
    groups: dict[str, dict[int, GivenRun]] = {}
    repeated: list[str] = []
    for run in runs:
        group = groups.setdefault(json.dumps(run.settings, sort_keys=True), {})
        first = group.setdefault(run.experiment.seed, run)
        if first is run:
            continue
        one, other = first.inputs.get("data", ""), run.inputs.get("data", "")
        if have_one_key(one, other) and one != other:
            raise ComparisonError(
                f"{first.path} and {run.path} have the same settings and seed, but other data: "
                "the data set was changed between them, so they are not of one experiment; "
                "leave one of them out"
            )
        same = f"it has the settings and the seed of {first.path}"
        repeated.append(f"{run.path} is left out: {same}, and a repeated run is no new seed.")
    variants = [tuple(group[seed] for seed in sorted(group)) for group in groups.values()]
    return dict(zip(_names(variants), variants, strict=True)), repeated


def _names(variants: Sequence[Sequence[GivenRun]]) -> list[str]:
    """Return unique names of variants, from their directories or else from differing settings."""
    names = [_directory_name(runs) for runs in variants]
    if all(names) and len(set(names)) == len(names):
        return names
    numbered = {str(number): runs[0].settings for number, runs in enumerate(variants)}
    table = settings_table(numbered)
    labels = [_settings_name(table, key) or name for key, name in zip(numbered, names, strict=True)]
    if all(labels) and len(set(labels)) == len(labels):
        return labels
    return [f"{name or 'variant'}-{number}" for number, name in enumerate(labels, start=1)]


def _directory_name(runs: Sequence[GivenRun]) -> str:
    """Return the common name of run directories without the seeds; "" if there is none."""
    paths = [run.path.resolve() for run in runs]
    names, parents = [path.name for path in paths], {path.parent for path in paths}
    if len(parents) == 1 and all(map(_SEED_DIRECTORY.fullmatch, names)):
        return paths[0].parent.name
    return names[0] if len(names) == 1 else _SEED_ENDING.sub("", common_prefix(names))


def _settings_name(table: SettingsTable, name: str) -> str:
    """Return a variant's differing settings as a name, `target_epsilon=8`; "" if it is too long."""
    values = table.values[name].items()
    text = ", ".join(f"{key.rpartition('.')[2]}={setting_text(value)}" for key, value in values)
    return text if len(text) <= _MAX_NAME_CHARACTERS else ""


_TEST_SETTINGS = ("data.dataset", "data.test_fraction")


def shared_digests(run: GivenRun) -> dict[str, str]:
    """Return digests of a run's data, initial model and planned participants, by name."""
    schedule, rounds = participation_of(run.experiment), run.experiment.federation.rounds
    return {
        "data": run.inputs["data"],
        "initial_model": run.inputs["model"],
        "participants": participants_digest(schedule, rounds),
    }


def _test_set_problems(variants: GivenVariants) -> Iterator[str]:
    """Yield a message for each variant whose test set differs from that of the first variant.

    Runs with the same seed must have the same test targets. If two variants have no seed in common,
    they must have the same settings of the test set.
    """
    (first, runs), *others = variants.items()
    for name, other in others:
        every = ((a, b) for a in runs for b in other)
        pairs = [(a, b) for a, b in every if a.experiment.seed == b.experiment.seed]
        unequal = [
            f" ({a.path} and {b.path})" for a, b in pairs if a.inputs["test"] != b.inputs["test"]
        ]
        mine, its = runs[0].settings, other[0].settings
        changes = [
            f"{key}: {setting_text(mine.get(key))} and {setting_text(its.get(key))}"
            for key in {**mine, **its}
            if key.startswith(_TEST_SETTINGS) and mine.get(key) != its.get(key)
        ]
        if unequal or (changes and not pairs):
            settings = f": {'; '.join(changes)}" if changes else ""
            problem = f"have different test sets{''.join(unequal[:1])}{settings}"
            yield (
                f"{first} and {name} {problem}, so their scores cannot be compared; "
                "compare runs with one test set"
            )

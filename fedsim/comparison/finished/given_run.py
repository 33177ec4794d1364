"""The run directories that a comparison is given: found, checked and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.comparison.differences import compared_settings
from fedsim.comparison.execution.jobs import FINISHED, MARKER
from fedsim.comparison.results import ComparisonError
from fedsim.experiment import Experiment, read_settings
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import read_yaml_object
from fedsim.runs.verification import verify_run

_MAX_UNSOUND = 10  # runs that are named
# Digests in `checkpoint/inputs.json` that are not of plug-ins.
_NO_PLUGIN = ("data", "test", "model", "privacy")


@dataclass(frozen=True)
class GivenRun:
    """A finished and sound run.

    Attributes:
        path: its directory, as it was given.
        directory: the same, with its readers.
        experiment: its settings.
        settings: `compared_settings`, the version of fedsim, the digest of each plug-in's source.
        inputs: the digests of `checkpoint/inputs.json`.
    """

    path: Path
    directory: RunDirectory
    experiment: Experiment
    settings: dict[str, object]
    inputs: dict[str, str]

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self.experiment.seed


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories; a directory of a comparison or of runs stands for them.

    A run that is given twice is returned once.

    Raises:
        RunDirectoryError: a path is no directory of a run or of a comparison.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for run in _runs_of(path):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_of(path: Path) -> list[Path]:
    """Return the run in a directory, those of a comparison, or those in its subdirectories."""
    if not path.is_dir():
        what = "is a file; name run directories alone" if path.exists() else "does not exist"
        raise RunDirectoryError(f"{path} {what}")
    if (path / MARKER).is_file():
        named = read_yaml_object(path / MARKER).get("runs")
        if isinstance(named, list):
            return [Path(str(one)) for one in named]
        return _below(path, "runs/*/*")
    inside = [] if _holds_run(path) else _below(path, "*")
    return inside or [path]


def _below(path: Path, pattern: str) -> list[Path]:
    return sorted(one for one in path.glob(pattern) if _holds_run(one))


def _holds_run(path: Path) -> bool:
    return (path / "experiment.yaml").is_file()


def read_given(paths: Sequence[Path]) -> tuple[list[GivenRun], list[str]]:
    """Return the finished runs, and one sentence for each run that is left out.

    Guarantee: `fedsim verify` finds every returned run sound, pages apart.

    Raises:
        RunDirectoryError: a directory holds no run.
        ComparisonError: runs are not sound; it names the first ones.
        ExperimentError: `experiment.yaml` of a run is not what this version writes.
        SchemaError: a run has another schema.
    """
    runs: list[GivenRun] = []
    left_out: list[str] = []
    unsound: list[str] = []
    for path in paths:
        directory = RunDirectory.open(path)
        status = _status(directory)
        if status not in FINISHED:
            left_out.append(f"{path} is left out: the run is {status}.")
            continue
        problems = list(verify_run(directory, pages=False).problems)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            unsound.append(f"{path}: {problems[0]}{more}")
        else:
            runs.append(_read(path, directory))
    if unsound:
        head = "a run that `fedsim verify` does not find sound cannot be compared:"
        more = len(unsound) - _MAX_UNSOUND
        tail = [f"and {more} more runs"] if more > 0 else []
        raise ComparisonError("\n".join([head, *unsound[:_MAX_UNSOUND], *tail]))
    return runs, left_out


def _status(directory: RunDirectory) -> str:
    try:
        return str(directory.read_json("summary.json").get("status"))
    except RunDirectoryError:
        return "unfinished"


def _read(path: Path, directory: RunDirectory) -> GivenRun:
    experiment = read_settings(directory.path / "experiment.yaml")
    inputs = directory.read_inputs()
    plugins = {name: digest[:12] for name, digest in inputs.items() if name not in _NO_PLUGIN}
    settings = {**compared_settings(experiment), "fedsim": directory.read_version(), **plugins}
    return GivenRun(path, directory, experiment, settings, inputs)

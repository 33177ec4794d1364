"""One job, with one run directory, for every variant and seed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.comparison.execution.client_metrics import FILE as CLIENT_METRICS
from fedsim.comparison.execution.fingerprint import run_fingerprint
from fedsim.comparison.execution.worker import RECORD
from fedsim.comparison.file.load import LoadedComparison
from fedsim.core.text_formats import parse_json
from fedsim.experiment import LoadedExperiment
from fedsim.runs.directory import RunDirectory, RunDirectoryError

Action = Literal["reuse", "run", "resume"]

MARKER = "comparison.yaml"
FINISHED = ("completed", "stopped")


@dataclass(frozen=True)
class Job:
    """One variant with one seed.

    Attributes:
        variant: name of the variant.
        seed: the experiment's seed.
        loaded: the experiment.
        directory: the run directory.
        digest: the fingerprint of the run.
        action: reuse a finished run, run from the start, or resume after the last round.
        measure: whether `client_metrics.json` must be written.
    """

    variant: str
    seed: int
    loaded: LoadedExperiment
    directory: Path
    digest: str
    action: Action
    measure: bool

    @property
    def is_pending(self) -> bool:
        """Whether a worker must run or measure it."""
        return self.action != "reuse" or self.measure

    def to_message(self) -> dict[str, Any]:
        """Return the job as a JSON message for a worker."""
        return {
            "action": self.action,
            "measure": self.measure,
            "experiment": self.loaded.experiment.model_dump(mode="json"),
            "base": str(self.loaded.base),
            "directory": str(self.directory.absolute()),
            "record": {
                "variant": self.variant,
                "seed": self.seed,
                "fingerprint": self.digest,
            },
        }


def check_directory(out: Path) -> None:
    """Check that a directory is new, empty, or one of a comparison.

    Raises:
        RunDirectoryError: it is none of these, or a file of a run is damaged.
        SchemaError: a run has another schema.
    """
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out} is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise RunDirectoryError(f"{out} is not empty and holds no comparison; choose another --out")
    if (out / MARKER).is_file() and "\nruns:" in (out / MARKER).read_text(encoding="utf-8"):
        raise RunDirectoryError(f"{out} holds a comparison of given runs; choose another --out")
    for record in sorted(out.glob(f"*/*/*/{RECORD}")):  # superseded runs are counted, too
        RunDirectory.open(record.parent).read_json(RECORD)


@contextmanager
def lock_directory(out: Path) -> Iterator[tuple[int, ...]]:
    """Hold a directory for one comparison: two at once would write into the same runs.

    The lock goes with the processes that hold it, however they end. Yields the descriptors that
    workers must inherit: one that outlives a killed caller for a moment still holds the directory.
    Platforms without file locks go without.

    Raises:
        RunDirectoryError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        yield ()
        return
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"another fedsim compare is running in {out}; wait for it or choose another --out"
            ) from error
        yield (file.fileno(),)


def plan_jobs(comparison: LoadedComparison, out: Path) -> list[Job]:
    """Return a job for every seed and variant, baseline and others of a seed side by side.

    A directory whose run belongs to another experiment (the file was changed since) is moved to
    `superseded/`, never deleted: its ledger says what was spent.
    """
    jobs = []
    for index, seed in enumerate(comparison.seeds):
        for variant in comparison.variants:
            loaded = variant.experiments[index]
            path = out / "runs" / variant.name / f"seed-{seed}"
            digest = run_fingerprint(loaded)
            action = _action(path, digest)
            if action == "run" and path.exists():
                _set_aside(path, out)
            missing = action != "reuse" or not (path / CLIENT_METRICS).is_file()
            measure = comparison.settings.client_metrics and missing
            jobs.append(Job(variant.name, seed, loaded, path, digest, action, measure))
    return jobs


def _action(path: Path, digest: str) -> Action:
    record, summary = _json(path / RECORD), _json(path / "summary.json")
    if record.get("fingerprint") != digest:
        return "run"
    return "reuse" if summary.get("status") in FINISHED else "resume"


def _set_aside(path: Path, out: Path) -> None:
    parent = out / "superseded" / path.parent.name
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while (target := parent / f"{path.name}-{number}").exists():
        number += 1
    os.replace(path, target)


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file that may be missing or cut short: {} then."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

"""What became of every run, read from its directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.client_metrics import FILE as CLIENT_METRICS
from fedsim.comparison.jobs import FINISHED, Job
from fedsim.comparison.worker import RECORD
from fedsim.runs.directory import RunDirectory, RunDirectoryError


@dataclass(frozen=True)
class Outcome:
    """One variant with one seed, after the comparison.

    Attributes:
        variant: its name.
        seed: the experiment's seed.
        path: the run directory, relative to the comparison's.
        status: as in `summary.json`, or "failed" for a run that wrote none.
        reason: why it failed; None for all others.
        reused: whether an earlier call had finished it.
        metrics: final metrics on the test set; None where not finite.
        private: whether its clients trained with differential privacy.
        epsilon: the largest ε of any client; None if infinite or not private.
        delta: the δ of `epsilon`; None if not private.
        seconds: wall-clock time of its rounds.
        rounds: the lines of `rounds.jsonl`.
        clients: `clients` of `privacy.json`.
        client_metrics: the global model on each client's own data; empty unless asked for.
        pairing: digests of what variants share.
    """

    variant: str
    seed: int
    path: str
    status: str
    reason: str | None
    reused: bool
    metrics: Mapping[str, float | None]
    private: bool
    epsilon: float | None
    delta: float | None
    seconds: float
    rounds: tuple[Mapping[str, Any], ...]
    clients: tuple[Mapping[str, Any], ...]
    client_metrics: tuple[Mapping[str, Any], ...]
    pairing: Mapping[str, str]

    @property
    def finished(self) -> bool:
        """Whether the run counts: it came to its planned end."""
        return self.status in FINISHED

    def to_json(self) -> dict[str, Any]:
        """Return the run as in `comparison.json`."""
        return {
            "variant": self.variant,
            "seed": self.seed,
            "status": self.status,
            "reason": self.reason,
            "reused": self.reused,
            **self.metrics,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "rounds": len(self.rounds),
            "seconds": self.seconds,
            "path": self.path,
        }


def read_outcome(job: Job, out: Path, failure: str | None) -> Outcome:
    """Return what became of a job.

    Args:
        job: the job.
        out: the comparison's directory.
        failure: what its worker said when it failed; None if it did not.
    """
    directory = RunDirectory(job.directory)
    summary = _read(directory, "summary.json", {})
    privacy = _read(directory, "privacy.json", {"clients": []})
    measured = _read(directory, CLIENT_METRICS, {"clients": []}) if failure is None else {}
    private = job.loaded.experiment.privacy is not None
    status = summary.get("status", "failed" if failure else "interrupted")
    return Outcome(
        variant=job.variant,
        seed=job.seed,
        path=job.directory.relative_to(out).as_posix(),
        status="failed" if failure else status,
        reason=failure or summary.get("reason"),
        reused=job.action == "reuse",
        metrics={name: value for name, value in summary.items() if name.startswith("test_")},
        private=private,
        epsilon=privacy.get("system_epsilon") if private else None,
        delta=summary.get("delta"),
        seconds=summary.get("seconds", 0.0),
        rounds=tuple(directory.read_rounds() if directory.rounds.is_file() else ()),
        clients=tuple(privacy["clients"]),
        client_metrics=tuple(measured.get("clients", ())),
        pairing=_read(directory, RECORD, {}).get("pairing", {}),
    )


def _read(directory: RunDirectory, name: str, default: dict[str, Any]) -> dict[str, Any]:
    try:
        return directory.read_json(name)
    except RunDirectoryError:  # the run did not get that far
        return default

"""Results of the single runs of a comparison, read from the run directories."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.comparison.jobs import FINISHED, Job
from fedsim.comparison.worker import CLIENT_METRICS, RECORD
from fedsim.core.metrics import computed_metrics
from fedsim.core.text_formats import is_finite
from fedsim.experiment import Experiment
from fedsim.report.contents import Scores, read_scores
from fedsim.runs.directory import RunDirectory, RunDirectoryError, RunFiles
from fedsim.runs.files import find_object
from fedsim.runs.recorded_figures import SCORES, personal_metrics
from fedsim.server.round_report import numbers_of


@dataclass(frozen=True)
class RunOutcome:
    """The result of one run, which is one variant with one seed."""

    variant: str
    seed: int
    path: str  # relative to the comparison's directory
    status: str  # of `summary.json`, or "failed" by the worker; "interrupted" without that file
    reason: str | None = None
    reused: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # None: not finite
    is_private: bool = False  # False for clipping without noise
    epsilon: float | None = None  # the largest of any client; None if infinite or not private
    delta: float | None = None
    trust: str | None = None  # None if not private
    unit: str | None = None  # also for clipping without noise; None without privacy settings
    certificates: Mapping[str, float | None] = field(default_factory=dict)  # ε by observer
    adjacency: str | None = None
    seconds: float = 0.0  # of all rounds
    rounds: tuple[Mapping[str, Any], ...] = ()
    clients: tuple[Mapping[str, Any], ...] = ()  # of `privacy.json`
    client_metrics: tuple[Mapping[str, Any], ...] = ()
    pair_digests: Mapping[str, str] = field(default_factory=dict)
    scores: Scores | None = None
    main_metric: str | None = None  # the first of `evaluation.metrics`, or the task's usual one
    constant_metrics: Mapping[str, float] = field(default_factory=dict)  # of the best constant

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its planned end; only such runs count in the results."""
        return self.status in FINISHED

    def to_json(self) -> dict[str, Any]:
        """Return the run's entry in `comparison.json`."""
        return {
            "variant": self.variant,
            "seed": self.seed,
            "status": self.status,
            "reason": self.reason,
            "reused": self.reused,
            **self.metrics,
            "trust": self.trust,
            "unit": self.unit,
            "epsilon": self.epsilon,
            "against": None if self.trust is None else CLAIMED_AGAINST[self.trust],
            "certificates": dict(self.certificates),
            "delta": self.delta,
            "rounds": len(self.rounds),
            "seconds": self.seconds,
            "path": self.path,
        }


def read_outcome(job: Job, out: Path, failure: str | None) -> RunOutcome:
    """Return the result of a job's run; `failure` is the reason if the worker reported one."""
    digests = _read(RunDirectory(job.directory), RECORD).get("pairing", {})
    outcome = read_run(job.directory, out, job.loaded.experiment, job.variant, digests)
    outcome = replace(outcome, reused=job.action == "reuse")
    if failure is None:
        return outcome
    return replace(outcome, status="failed", reason=failure, client_metrics=())


def read_run(
    path: Path, out: Path, experiment: Experiment, variant: str, pair_digests: Mapping[str, str]
) -> RunOutcome:
    """Return the result of a run, read from its files, of which some may be missing."""
    directory = RunDirectory(path)
    summary, privacy = _read(directory, "summary.json"), _read(directory, "privacy.json")
    settings = experiment.privacy
    scores = read_scores(directory) if is_finite(find_object(path / SCORES)) else None
    constant = {} if scores is None else scores.constant_metrics(experiment.model.loss)
    private = settings if settings is not None and settings.adds_noise else None
    certificates = privacy.get("certificates", ()) if private else ()
    computed = computed_metrics(experiment.model.loss, experiment.metrics)
    return RunOutcome(
        variant=variant,
        seed=experiment.seed,
        path=Path(os.path.relpath(path, out)).as_posix(),
        status=summary.get("status", "interrupted"),
        reason=summary.get("reason"),
        reused=True,
        metrics={**numbers_of(summary, ("test_",)), **personal_metrics(summary)},
        is_private=private is not None,
        epsilon=privacy.get("system_epsilon") if private else None,
        delta=summary.get("delta") if private else None,
        seconds=summary.get("seconds", 0.0),
        rounds=tuple(RunFiles(directory).rounds if directory.rounds.is_file() else ()),
        clients=tuple(privacy.get("clients", ())),
        client_metrics=tuple(_read(directory, CLIENT_METRICS).get("clients", ())),
        pair_digests=pair_digests,
        trust=None if private is None else private.trust.name,
        unit=None if settings is None else settings.unit,
        certificates={entry["against"]: entry["epsilon"] for entry in certificates},
        adjacency=None if private is None else private.adjacency.name,
        scores=scores,
        main_metric=f"test_{computed[1]}" if len(computed) > 1 else None,
        constant_metrics={f"test_{name}": value for name, value in constant.items()},
    )


def _read(directory: RunDirectory, name: str) -> dict[str, Any]:
    try:
        content = directory.read_json(name)
    except RunDirectoryError:  # the run did not get that far
        return {}
    return content if is_finite(content) else {}


def finite_values(outcomes: Sequence[RunOutcome], metric: str) -> dict[int, float]:
    """Return the finite values of a metric in the finished runs, by the seed of the run."""
    values = {run.seed: run.metrics.get(metric) for run in outcomes if run.is_finished}
    return {seed: value for seed, value in values.items() if value is not None}


def shared_values(
    outcomes: Sequence[RunOutcome], baseline: Sequence[RunOutcome], metric: str
) -> dict[int, tuple[float, float]]:
    """Return pairs (value, value of the baseline) of the seeds with both finite, by the seed."""
    mine, other = finite_values(outcomes, metric), finite_values(baseline, metric)
    return {seed: (value, other[seed]) for seed, value in mine.items() if seed in other}

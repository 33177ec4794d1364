"""Run an experiment: from a file to a finished run directory."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedsim.core.errors import FedsimError
from fedsim.experiment import LoadedExperiment, dump_experiment, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.budget_check import refuse_overspending
from fedsim.federation.federation import Federation
from fedsim.federation.shards import client_app
from fedsim.protocol.messages import to_arrays, to_numpy
from fedsim.runs.directory import Checkpoint, RunDirectory, RunDirectoryError
from fedsim.runs.environment import describe_environment
from fedsim.runs.inputs import fingerprint, refuse_other_inputs
from fedsim.runs.privacy_summary import (
    PrivacySummary,
    finite_or_none,
    not_private,
    summarise_privacy,
)
from fedsim.runs.resume import refuse_changes
from fedsim.runs.secure_summary import secure_summary
from fedsim.server.app import RoundError, RoundResult, Start
from fedsim.server.errors import FederationError
from fedsim.server.evaluation import EvaluationResult
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.simulation.engine import Engine
from fedsim.simulation.engines import (
    LocalEngine,
    engine_for,
)
from fedsim.tracking.observer import RunObserver, with_trackers

Status = Literal["completed", "stopped", "interrupted", "failed"]


class RunFailedError(FedsimError, RuntimeError):
    """A run that could not be finished; `result` holds what there is of it."""

    def __init__(self, message: str, result: "RunResult") -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class RunResult:
    """A run that ended.

    Attributes:
        path: the run directory.
        status: completed; stopped because privacy budgets are spent; interrupted by the user.
        reason: why it ended early; None if it completed.
        metrics: final metrics of the global model, on the test set (such as `test_accuracy`) and,
            with `evaluation:`, on the clients' held-out examples (`clients_accuracy`).
        privacy: what every client spent; None in a federation without privacy.
        rounds: one mapping for each finished round, as in `rounds.jsonl`.
        seconds: wall-clock time of the rounds.
    """

    path: Path
    status: Status
    reason: str | None
    metrics: Mapping[str, float]
    privacy: PrivacySummary | None
    rounds: tuple[Mapping[str, Any], ...]
    seconds: float


def run_experiment(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    base: str | Path | None = None,
    observer: RunObserver | None = None,
    engine: Engine | None = None,
) -> RunResult:
    """Run an experiment, write its run directory but for the report, and return its result.

    Args and errors: as `fedsim.run`.
    """
    loaded = load_experiment(source, overrides, base=base)
    observer = with_trackers(loaded.experiment.runtime.trackers, observer)
    engine = engine or engine_for(loaded.experiment.runtime)
    if resume:
        return _resume(loaded, out, observer, engine)
    directory = RunDirectory(Path(out) if out is not None else _default_path(loaded))
    directory.refuse_overwriting()
    federation = _federation_of(loaded, directory, engine)
    refuse_overspending(federation)
    directory.create(
        experiment=dump_experiment(loaded.experiment),
        environment=describe_environment(seed=loaded.experiment.seed),
        inputs=fingerprint(federation),
    )
    return _Recorder(federation, directory, observer, engine).run()


def _resume(
    loaded: LoadedExperiment,
    out: str | Path | None,
    observer: RunObserver | None,
    engine: Engine,
) -> RunResult:
    if out is None:
        raise RunDirectoryError("to resume, name the run directory with --out")
    directory = RunDirectory.open(Path(out))
    before = load_experiment(directory.path / "experiment.yaml", base=loaded.base)
    refuse_changes(before.experiment, loaded.experiment)
    federation = _federation_of(loaded, directory, engine)
    refuse_other_inputs(directory.read_json("checkpoint/inputs.json"), federation)
    refuse_overspending(federation)
    directory.write_text("experiment.yaml", dump_experiment(loaded.experiment))
    return _Recorder(federation, directory, observer, engine, resume=True).run()


def _federation_of(loaded: LoadedExperiment, directory: RunDirectory, engine: Engine) -> Federation:
    here = isinstance(engine, LocalEngine)
    return assemble(loaded, ledger=directory.ledger, in_process=here)


class _Recorder:
    """Runs a federation and writes down what happens."""

    def __init__(
        self,
        federation: Federation,
        directory: RunDirectory,
        observer: RunObserver | None,
        engine: Engine,
        *,
        resume: bool = False,
    ) -> None:
        self._engine = engine
        self._federation = federation
        self._directory = directory
        self._observer = observer
        self._rows: list[dict[str, Any]] = []
        self._start = Start(federation.initial_arrays())
        if resume:
            checkpoint = directory.read_checkpoint()
            finished = 0 if checkpoint is None else checkpoint.round_number
            self._rows = directory.forget_rounds_after(finished)
            if checkpoint is not None:
                self._start = Start(
                    to_arrays(dict(checkpoint.arrays)),
                    first_round=finished + 1,
                    withdrawn=frozenset(withdrawals(self._rows)),
                    clip_norms=checkpoint.clip_norms,
                )
        self._arrays = self._start.arrays
        self._clip_norms = self._start.clip_norms
        self._stopped: str | None = None
        self._finished = self._start.first_round - 1

    def run(self) -> RunResult:
        """Execute the federation and write the run directory whatever happens."""
        if self._observer is not None:
            self._observer.started(self._federation, self._directory.path)
        status: Status = "completed"
        reason: str | None = None
        failure: Exception | None = None
        try:
            self._execute()
            if self._stopped is not None:
                status, reason = "stopped", self._stopped
        except KeyboardInterrupt:
            status, reason = "interrupted", "interrupted by the user"
        except FederationError as error:
            status, reason, failure = "failed", str(error), error
            if isinstance(
                error, RoundError
            ):  # not checkpointed: a resumed run tries the round again
                self._record(error.result)
        finally:
            if self._observer is not None:
                self._observer.ended()
        result = self._finish(status, reason)
        if failure is not None:
            raise RunFailedError(str(failure), result) from failure
        return result

    def _execute(self) -> None:
        engine = self._engine
        server = self._federation.server_app(
            start=self._start,
            on_round=self._on_round,
            on_stop=self._on_stop,
            book=self._federation.client_ledgers(),
            patience=engine.patience,
            openings=OpenedSums(self._directory.read_opening(), self._directory.write_opening),
        )
        client = client_app(
            self._federation,
            in_process=isinstance(engine, LocalEngine),
            ledger=self._directory.ledger,
        )
        engine.execute(server, client, self._federation.num_nodes)

    def _on_stop(self, reason: str) -> None:
        self._stopped = reason

    def _on_round(self, result: RoundResult) -> None:
        self._arrays = result.arrays
        self._clip_norms = result.clip_norms
        self._finished = result.round_number
        self._record(result)

    def _record(self, result: RoundResult) -> None:
        row = _round_row(result)
        if self._federation.secure is not None:
            declared = self._federation.secure.settings.metrics
            row |= {name: result.client_metrics.get(name) for name in declared}
            row["secure_aggregation"] = {
                "survivors": len(result.participants),
                "aborted": result.aborted,
                "retried": result.retried,
                "clipped": result.clipped,
                "clipped_metrics": result.clipped_metrics,
            }
        if self._federation.experiment.evaluation is not None:
            row |= _evaluation_figures(result.evaluated)
        self._directory.append_round(row)
        if self._finished == result.round_number:
            self._directory.write_checkpoint(
                Checkpoint(result.round_number, to_numpy(result.arrays), result.clip_norms)
            )
        self._rows.append(row)
        if self._observer is not None:
            self._observer.round_finished(row)

    def _finish(self, status: Status, reason: str | None) -> RunResult:
        seconds = sum(row["seconds"] for row in self._rows)
        secure = secure_summary(
            self._federation, self._rows, one_operator=self._engine.one_operator
        )
        privacy = summarise_privacy(
            self._federation,
            withdrawn=withdrawals(self._rows),
            secure_aggregation=secure,
            clip_norms=self._clip_norms,
        )
        sizes = self._federation.data.clients.sizes
        content = privacy.to_json() if privacy else not_private(sizes, secure)
        metrics = {
            name: value
            for name, value in (self._rows[-1] if self._rows else {}).items()
            if name.startswith(("test_", "clients_"))
        }
        directory = self._directory
        directory.write_model(to_numpy(self._arrays))
        directory.write_json("privacy.json", content)
        directory.write_clients(content["clients"])
        directory.write_json(
            "summary.json",
            {
                "name": self._federation.experiment.name,
                "status": status,
                "reason": reason,
                "rounds": self._finished,
                **metrics,
                "epsilon": privacy.epsilon_statistics if privacy else None,
                "delta": max(spend.delta for spend in privacy.clients) if privacy else None,
                "seconds": round(seconds, 3),
            },
        )
        return RunResult(
            path=directory.path,
            status=status,
            reason=reason,
            metrics=metrics,
            privacy=privacy,
            rounds=tuple(self._rows),
            seconds=seconds,
        )


def _round_row(result: RoundResult) -> dict[str, Any]:
    epsilon = result.epsilon_max
    return {
        "round": result.round_number,
        **{name: finite_or_none(value) for name, value in result.metrics.items()},
        "participants": list(result.participants),
        "failed": [
            {"client": failure.client, "reason": failure.reason} for failure in result.failed
        ],
        "withdrawn": [
            {"client": withdrawal.client, "reason": withdrawal.reason}
            for withdrawal in result.withdrawn
        ],
        "shortened": [
            {"client": client, "steps": steps} for client, steps in result.shortened.items()
        ],
        "seconds": round(result.seconds, 4),
        "timeline": {part: round(seconds, 4) for part, seconds in result.timeline.items()},
        "epsilon_max": None if epsilon is None else finite_or_none(epsilon),
        "clip_norm": _spread(result.clip_norms.values()),
    }


def _evaluation_figures(found: EvaluationResult | None) -> dict[str, Any]:
    """Return what clients found on held-out examples, as keys of a row."""
    if found is None:
        return {"evaluated": None}
    return {
        **{f"clients_{name}": finite_or_none(value) for name, value in found.metrics.items()},
        "evaluated": {
            "clients": list(found.clients),
            "examples": found.examples,
            "failed": [{"client": c, "reason": reason} for c, reason in found.failed.items()],
        },
    }


def _spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return the smallest, the median and the largest value; None of none."""
    found = sorted(values)
    if not found:
        return None
    return {"min": found[0], "median": statistics.median(found), "max": found[-1]}


def withdrawals(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the round in which each client that withdrew did so, from rows of `rounds.jsonl`."""
    return {one["client"]: row["round"] for row in rows for one in row["withdrawn"]}


def _default_path(loaded: LoadedExperiment) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = Path("runs") / f"{loaded.experiment.name}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())

"""Runs an experiment: from a file to a finished run directory without its report."""

from collections.abc import Mapping, Sequence
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
from fedsim.protocol.arrays import to_numpy
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.environment import describe_environment
from fedsim.runs.inputs import fingerprint, refuse_other_inputs
from fedsim.runs.privacy_summary import PrivacySummary, not_private, summarise_privacy
from fedsim.runs.resume import refuse_changes
from fedsim.runs.secure_summary import secure_summary
from fedsim.server.app import RoundError
from fedsim.server.errors import FederationError
from fedsim.server.round_report import RoundReport, RoundRow, withdrawal_rounds
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.server.state import ServerState
from fedsim.simulation.engine import Engine
from fedsim.simulation.engines import LocalEngine, engine_for
from fedsim.tracking.observer import RunObserver, add_trackers

Status = Literal["completed", "stopped", "interrupted", "failed"]


class RunFailedError(FedsimError, RuntimeError):
    """A failed run; `result` holds its rounds so far."""

    def __init__(self, message: str, result: "RunResult") -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        path: the run directory.
        status: completed; stopped because privacy budgets are spent; interrupted by the user.
        reason: why the run ended early; None for a completed run.
        metrics: final metrics of the global model, on the test set (such as `test_accuracy`) and,
            with `evaluation:`, on the clients' held-out examples (`clients_accuracy`).
        privacy: spend of every client; None in a federation without privacy.
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
    """Run an experiment, write its run directory without the report, and return its result.

    Args and errors: as `fedsim.run`.
    """
    loaded = load_experiment(source, overrides, base=base)
    observer = add_trackers(loaded.experiment.runtime.trackers, observer)
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
    directory.refuse_other_version()
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
    """Runs a federation and writes every round to its run directory."""

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
        self._rows: list[RoundRow] = []
        self._state = ServerState(federation.initial_arrays())
        if resume:
            self._state = directory.read_checkpoint() or self._state
            self._rows = directory.forget_rounds_after(self._state.round_number)
        self._stopped: str | None = None

    def run(self) -> RunResult:
        """Execute the federation and write the run directory, also after a failure."""
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
            if isinstance(error, RoundError):  # not checkpointed: a resumed run repeats the round
                self._record(error.report)
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
            start=self._state,
            on_round=self._on_round,
            on_stop=self._on_stop,
            ledgers=self._federation.client_ledgers(),
            patience=engine.patience,
            opened_sums=OpenedSums(self._directory.read_opening(), self._directory.write_opening),
        )
        client = client_app(
            self._federation,
            in_process=isinstance(engine, LocalEngine),
            ledger=self._directory.ledger,
        )
        engine.execute(server, client, self._federation.num_nodes)

    def _on_stop(self, reason: str) -> None:
        self._stopped = reason

    def _on_round(self, state: ServerState, report: RoundReport) -> None:
        self._state = state
        self._record(report, checkpoint=state)

    def _record(self, report: RoundReport, *, checkpoint: ServerState | None = None) -> None:
        row = report.to_json()
        self._directory.append_round(row)
        if checkpoint is not None:
            self._directory.write_checkpoint(checkpoint)
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
            withdrawn=withdrawal_rounds(self._rows),
            secure_aggregation=secure,
            clip_norms=self._state.clip_norms,
        )
        sizes = self._federation.data.clients.sizes
        content = privacy.to_json() if privacy else not_private(sizes, secure)
        last: dict[str, Any] = {**self._rows[-1]} if self._rows else {}
        metrics: dict[str, float] = {
            name: value for name, value in last.items() if name.startswith(("test_", "clients_"))
        }
        directory = self._directory
        directory.write_model(to_numpy(self._state.arrays))
        directory.write_json("privacy.json", content)
        directory.write_clients(content["clients"])
        directory.write_json(
            "summary.json",
            {
                "name": self._federation.experiment.name,
                "status": status,
                "reason": reason,
                "rounds": self._state.round_number,
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


def _default_path(loaded: LoadedExperiment) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = Path("runs") / f"{loaded.experiment.name}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())

"""Run an experiment: from a file to a finished run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from fedsim.environment import describe_environment
from fedsim.experiment import LoadedExperiment, dump_experiment, load_experiment
from fedsim.federation import Federation, assemble
from fedsim.privacy_summary import PrivacySummary, finite_or_none, not_private, summarise_privacy
from fedsim.report.html import write_report
from fedsim.resuming import refuse_changes
from fedsim.run_directory import RunDirectory, RunDirectoryError
from fedsim.server.app import FederationError, RoundResult, Start
from fedsim.server.privacy_book import PrivacyBook
from fedsim.server.protocol import to_arrays, to_numpy
from fedsim.simulation.engines import LocalEngine, engine_for

Status = Literal["completed", "stopped", "interrupted", "failed"]


class RunFailedError(RuntimeError):
    """A run that could not be finished; `result` holds what there is of it."""

    def __init__(self, message: str, result: "RunResult") -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class RunResult:
    """A run that ended.

    Attributes:
        path: the run directory.
        status: completed, or interrupted by the user.
        metrics: final metrics of the global model on the test set, such as `test_accuracy`.
        privacy: what every client spent; None in a federation without privacy.
        rounds: one mapping for each finished round, as in `rounds.jsonl`.
        seconds: wall-clock time of the rounds.
    """

    path: Path
    status: Status
    metrics: Mapping[str, float]
    privacy: PrivacySummary | None
    rounds: tuple[Mapping[str, Any], ...]
    seconds: float


class RunObserver(Protocol):
    """Somebody who watches a run, such as the terminal."""

    def started(self, federation: Federation, path: Path) -> None:
        """Called when the first round is about to start."""
        ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Called after each round with its line of `rounds.jsonl`."""
        ...

    def ended(self) -> None:
        """Called once when no round will follow."""
        ...


def run(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    observer: RunObserver | None = None,
) -> RunResult:
    """Run an experiment and return its result.

    Args:
        source: path of an experiment file, or its content as a mapping.
        overrides: `{"key.path": value}` or `["key.path=value", ...]`, applied before validation.
        out: the run directory; must be new or empty. Default: `runs/<name>-<time>`.
        resume: continue the run in `out` after its last finished round. The result is the one of
            an uninterrupted run, to the bit; what an interrupted round spent stays spent.
        observer: is told of every round.

    Raises:
        ExperimentError: the experiment is wrong; it lists every mistake with its place.
        ValueError: data, model, loss or run directory do not fit.
        RunFailedError: the federation could not go on; its `result` is what there is.
    """
    loaded = load_experiment(source, overrides)
    if resume:
        return _resume(loaded, out, observer)
    directory = RunDirectory(Path(out) if out is not None else _default_path(loaded))
    directory.refuse_overwriting()
    federation = assemble(loaded, ledger=directory.ledger)
    directory.create(
        experiment=dump_experiment(loaded.experiment),
        environment=describe_environment(seed=loaded.experiment.seed),
    )
    return _Recorder(federation, directory, observer).run()


def _resume(
    loaded: LoadedExperiment, out: str | Path | None, observer: RunObserver | None
) -> RunResult:
    if out is None:
        raise RunDirectoryError("to resume, name the run directory with --out")
    directory = RunDirectory.open(Path(out))
    before = load_experiment(directory.path / "experiment.yaml", base=loaded.base)
    refuse_changes(before.experiment, loaded.experiment)
    federation = assemble(loaded, ledger=directory.ledger)
    directory.write_text("experiment.yaml", dump_experiment(loaded.experiment))
    return _Recorder(federation, directory, observer, resume=True).run()


class _Recorder:
    """Runs a federation and writes down what happens."""

    def __init__(
        self,
        federation: Federation,
        directory: RunDirectory,
        observer: RunObserver | None,
        *,
        resume: bool = False,
    ) -> None:
        self._federation = federation
        self._directory = directory
        self._observer = observer
        self._rows: list[dict[str, Any]] = []
        self._start = Start(federation.initial_arrays())
        if resume:
            checkpoint = directory.read_checkpoint()
            finished = 0 if checkpoint is None else checkpoint[0]
            self._rows = directory.forget_rounds_after(finished)
            if checkpoint is not None:
                self._start = Start(to_arrays(checkpoint[1]), first_round=finished + 1)
        self._arrays = self._start.arrays

    def run(self) -> RunResult:
        """Execute the federation and write the run directory whatever happens."""
        if self._observer is not None:
            self._observer.started(self._federation, self._directory.path)
        status: Status = "completed"
        failure: Exception | None = None
        try:
            self._execute()
        except KeyboardInterrupt:
            status = "interrupted"
        except FederationError as error:
            status, failure = "failed", error
        finally:
            if self._observer is not None:
                self._observer.ended()
        result = self._finish(status, failure)
        if failure is not None:
            raise RunFailedError(str(failure), result) from failure
        return result

    def _execute(self) -> None:
        experiment = self._federation.experiment
        engine = engine_for(experiment.runtime)
        book = None
        if experiment.privacy is not None:
            book = PrivacyBook(experiment.privacy.accountant, experiment.privacy.adjacency)
            for statement in self._federation.recorded_statements():
                book.record(statement)
        server = self._federation.server_app(start=self._start, on_round=self._on_round, book=book)
        client = self._federation.client_app(
            in_process=isinstance(engine, LocalEngine), ledger=self._directory.ledger
        )
        engine.execute(server, client, self._federation.num_clients)

    def _on_round(self, result: RoundResult) -> None:
        self._arrays = result.arrays
        row = _round_row(result)
        self._directory.append_round(row)
        self._directory.write_checkpoint(result.round_number, to_numpy(result.arrays))
        self._rows.append(row)
        if self._observer is not None:
            self._observer.round_finished(row)

    def _finish(self, status: Status, failure: Exception | None) -> RunResult:
        seconds = sum(row["seconds"] for row in self._rows)
        privacy = summarise_privacy(self._federation)
        sizes = [len(examples) for examples in self._federation.data.clients]
        content = privacy.to_json() if privacy else not_private(sizes)
        metrics = {
            name: value
            for name, value in (self._rows[-1] if self._rows else {}).items()
            if name.startswith("test_")
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
                "reason": None if failure is None else str(failure),
                "rounds": len(self._rows),
                **metrics,
                "epsilon": privacy.epsilon_statistics if privacy else None,
                "delta": max(spend.delta for spend in privacy.clients) if privacy else None,
                "seconds": round(seconds, 3),
            },
        )
        write_report(directory)
        return RunResult(
            path=directory.path,
            status=status,
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
        "withdrawn": list(result.withdrawn),
        "seconds": round(result.seconds, 4),
        "timeline": {part: round(seconds, 4) for part, seconds in result.timeline.items()},
        "epsilon_max": None if epsilon is None else finite_or_none(epsilon),
    }


def _default_path(loaded: LoadedExperiment) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = Path("runs") / f"{loaded.experiment.name}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())

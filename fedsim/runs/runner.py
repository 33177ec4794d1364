"""Function that runs an experiment, from its file to a finished run directory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import fedsim
from fedsim.algorithms.state import ServerState
from fedsim.core.commands import INTERRUPTED, Phases
from fedsim.core.errors import StorageError, describe_os_error, follows_interrupt, one_line
from fedsim.experiment import ExperimentError, LoadedExperiment, dump_experiment, load_experiment
from fedsim.experiment.load import with_clients
from fedsim.federation.apps import client_app, server_app
from fedsim.federation.assembly import assemble, refuse_overspending
from fedsim.federation.federation import Federation
from fedsim.federation.mechanism_probe import probe_mechanisms
from fedsim.protocol.arrays import digest
from fedsim.protocol.errors import FederationError
from fedsim.runs.directory import RunDirectory, RunDirectoryError, RunFiles, privacy_text
from fedsim.runs.files import SCHEMAS, DamagedRunError, LinesFile, check_version
from fedsim.runs.inputs import describe_environment, fingerprint, refuse_other_inputs
from fedsim.runs.manifest import FILE, refuse_changed_records, write_manifest
from fedsim.runs.privacy_summary import (
    PrivacySummary,
    privacy_file,
    secure_facts,
    summarise_privacy,
)
from fedsim.runs.recorded_figures import (
    COUNTS,
    FIGURES,
    PERSONALIZATION,
    EndedRun,
    personal_metrics,
    public_metrics,
    summary_of,
)
from fedsim.runs.records import ModelCard, Releases, RunCheckpoint, repeated_failures
from fedsim.runs.resume import contradictions, refuse_changes, resume_command
from fedsim.runs.run_result import RunFailedError as RunFailedError
from fedsim.runs.run_result import RunResult as RunResult
from fedsim.runs.run_result import Status
from fedsim.server.app import RoundError
from fedsim.server.round_report import RoundReport, RoundRow, numbers_of
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.simulation.engine import Engine
from fedsim.simulation.engines import LocalEngine, engine_for
from fedsim.tracking.callbacks import RunCallback
from fedsim.tracking.trackers import add_trackers

_RESUME_OR_START_ANEW = "resume it with fedsim {version}, or start a new run with another --out"
AddPages = Callable[[RunDirectory], None]


@dataclass(frozen=True)
class RunParts:
    """The engine that executes a run, and the functions that are called during the run."""

    engine: Engine
    callback: RunCallback
    add_pages: AddPages | None  # writes pages such as the report
    phases: Phases  # shows what the run does before and after the rounds

    @property
    def is_local(self) -> bool:
        """Whether all clients train in this process."""
        return isinstance(self.engine, LocalEngine)


def run_experiment(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    base: str | Path | None = None,
    callback: RunCallback | None = None,
    engine: Engine | None = None,
    add_pages: AddPages | None = None,
) -> RunResult:
    """Run an experiment, write its run directory, and return its result.

    Arguments and errors are those of `fedsim.run`. The function `add_pages` writes pages, such as
    the report. It is called at the end of a run, even if the run failed or was interrupted.
    """
    loaded = load_experiment(source, overrides, base=base)
    runtime = loaded.experiment.runtime
    watcher = add_trackers(runtime.trackers, callback, base=loaded.base)
    parts = RunParts(engine or engine_for(runtime), watcher, add_pages, Phases(watcher.phase))
    if resume and out is None:
        raise RunDirectoryError("to resume, name the run directory with --out")
    path = Path(out) if out is not None else _default_path(loaded)
    try:
        recorder = (_resume if resume else _start)(loaded, path, parts)
        with recorder.running():
            parts.engine.execute(*recorder.apps())
        return recorder.result
    except OSError as error:
        cause = describe_os_error(error)
        if not (path / "experiment.yaml").exists():
            raise StorageError(f"{cause}; nothing of the run was written") from error
        raise StorageError(
            f"{cause}; {path} keeps every finished round and every charge: once that is fixed, go "
            f"on with {resume_command(source, overrides, path)}"
        ) from error
    finally:
        parts.phases.end()


def _start(loaded: LoadedExperiment, path: Path, parts: RunParts) -> "_Recorder":
    """Return the recorder of a new run; nothing is written yet."""
    directory = RunDirectory(path)
    directory.refuse_overwriting()
    return _Recorder(_checked_federation(loaded, directory, parts, None), directory, parts, None)


def _resume(loaded: LoadedExperiment, path: Path, parts: RunParts) -> "_Recorder":
    """Return the recorder of a resumed run, whose directory stays locked.

    The whole run is checked before anything is spent or written.
    """
    directory = RunDirectory.open(path)
    check_version(path, directory.read_version(), _RESUME_OR_START_ANEW)
    directory.lock()
    try:
        parts.phases.begin("checking the finished rounds")
        files = RunFiles(directory)
        try:
            before = files.experiment
        except ExperimentError as error:
            problem = f"the file is damaged: {str(error).splitlines()[0]}"
            raise DamagedRunError.of(path / "experiment.yaml", problem) from error
        experiment = with_clients(loaded, before.num_clients)
        refuse_changes(before, experiment)
        inputs = directory.read_inputs()
        for problem in contradictions(files, ledger_lags=not parts.engine.writes_ledger):
            raise DamagedRunError.of(path, problem)
        refuse_changed_records(directory)
        loaded = replace(loaded, experiment=experiment)
        federation = _checked_federation(loaded, directory, parts, inputs)
        return _Recorder(federation, directory, parts, files)
    except BaseException:
        directory.unlock()
        raise


def _checked_federation(
    loaded: LoadedExperiment, run: RunDirectory, parts: RunParts, inputs: Mapping[str, str] | None
) -> Federation:
    """Return the federation of a run after a check of its inputs, its noise and its clipping.

    `inputs` are the digests of the inputs of the run to resume; None for a new run.
    """
    phases, here = parts.phases, parts.is_local
    federation = assemble(loaded, ledger=run.ledger, in_process=here, phases=phases)
    if inputs is not None:
        refuse_other_inputs(inputs, federation)
    refuse_overspending(federation)
    phases.begin("checking noise and clipping")
    if here and inputs is None:
        federation.blocks.check_round(1)
    probe_mechanisms(federation)
    phases.end()
    return federation


@dataclass
class _Recorder:
    """Writes every round and the results at the end to the run directory.

    `finished` has the files of the run to resume; None for a new run.
    """

    federation: Federation
    directory: RunDirectory
    parts: RunParts
    finished: InitVar[RunFiles | None]
    status: Status = "completed"
    reason: str | None = None
    failure: Exception | None = None  # raised when the files are written
    result: RunResult = field(init=False)

    def __post_init__(self, finished: RunFiles | None) -> None:
        self._rounds = LinesFile(self.directory.rounds)
        self._releases = LinesFile(self.directory.releases)
        self._ledgers = self.federation.client_ledgers()
        self._is_new = finished is None
        self._state, self._rows = ServerState(self.federation.initial_arrays()), list[RoundRow]()
        if finished is not None:
            self._state = finished.state or self._state
            self._rows = finished.rounds[: self._state.round_number]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the rounds that the block executes, write all files, and set `result`.

        An error that ends the rounds is raised after the files are written. Of several errors the
        first is raised. After Ctrl-C, the result has the finished rounds.
        """
        try:
            try:
                with self._recording():
                    yield
                self._conclude()
            except KeyboardInterrupt as interrupt:
                if not self.directory.is_locked:
                    raise  # there is no directory yet
                self._end("interrupted", str(interrupt) or INTERRUPTED)
                self._conclude()
        except OSError as error:
            raise self.failure or error from error
        finally:
            self.directory.unlock()
        if isinstance(self.failure, FederationError):
            raise RunFailedError(str(self.failure), self.result) from self.failure
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Start the engine, make the directory, and record how the rounds in the block end."""
        phases, callback = self.parts.phases, self.parts.callback
        if not self.parts.is_local:
            phases.begin("starting the engine")
        with self.parts.engine.session():
            self._make_directory()
            phases.end()
            try:
                callback.started(self.federation, self.directory.path)
                yield
            except RoundError as error:  # not checkpointed: a resumed run repeats the round
                with suppress(OSError):  # the disk may be full
                    self._append(error.report)
                    callback.round_finished(error.report.to_json())
                self._end("failed", str(error), error)
            except Exception as error:  # raised when the files are written
                if follows_interrupt(error):
                    raise KeyboardInterrupt from error
                is_of_system = isinstance(error, OSError)
                reason = describe_os_error(error) if is_of_system else one_line(error)
                self._end("failed", reason, error)
            finally:
                callback.ended()

    def _make_directory(self) -> None:
        """Create the directory of a new run, or rewind a resumed one to its last checkpoint."""
        directory, federation = self.directory, self.federation
        experiment = federation.experiment
        if self._is_new:
            directory.create(
                experiment=dump_experiment(experiment),
                environment=describe_environment(seed=experiment.seed),
                inputs=fingerprint(federation),
                opens_sums=federation.secure is not None or experiment.has_server_noise,
            )
            return
        directory.remove(FILE)
        directory.write_text("experiment.yaml", dump_experiment(experiment))
        self._rounds.cut(self._state.round_number)
        self._releases.cut(self._state.round_number)

    def apps(self) -> tuple[ServerApp, ClientApp, int]:
        """Return the server app, the client app and the number of nodes of the federation."""
        directory, federation = self.directory, self.federation
        server = server_app(
            federation,
            start=self._state,
            on_round=self._on_round,
            on_stop=partial(self._end, "stopped"),
            ledgers=self._ledgers,
            opened_sums=OpenedSums(directory.read_opening(), directory.write_opening),
        )
        if self.parts.is_local:
            return server, client_app(federation), federation.num_nodes
        from fedsim.federation.nodes import FederationClientApp

        return server, FederationClientApp(federation, directory.ledger), federation.num_nodes

    def _end(self, status: Status, reason: str, failure: Exception | None = None) -> None:
        self.status, self.reason, self.failure = status, reason, failure

    def _on_round(self, state: ServerState, report: RoundReport) -> None:
        self._append(report)
        spends = {} if self._ledgers is None else self._ledgers.spends
        heads = {client: spend.head for client, spend in spends.items() if spend.rounds}
        checkpoint = RunCheckpoint(state, heads, self._rounds.digest, self._releases.digest)
        self.directory.write_checkpoint(checkpoint)
        self._state = state
        self.parts.callback.round_finished(report.to_json())

    def _append(self, report: RoundReport) -> None:
        """Write the releases of a round, then its row: no row is without its releases."""
        releases = Releases(
            round=report.round_number,
            conditions=self.federation.conditions,
            blocks="planned" if self.parts.engine.plans_blocks else "alone",
            model=report.model.digest,
            uploads=dict(report.clients.uploads),
        )
        self._releases.append(releases.model_dump_json())
        self._rounds.append(json.dumps(row := report.to_json(), allow_nan=False))
        self._rows.append(row)

    def _conclude(self) -> None:
        """Write the result files, their manifest and pages, and set `result`."""
        self.directory.remove(FILE)  # an interrupt may end the run a second time
        phases = self.parts.phases
        phases.begin("computing the results")
        self.result = self._finish()
        write_manifest(self.directory)
        if self.parts.add_pages is not None:
            phases.begin("writing the report")
            self.parts.add_pages(self.directory)
        phases.end()

    def _finish(self) -> RunResult:
        rows, federation, directory = self._rows, self.federation, self.directory
        seconds = sum(row["seconds"] for row in rows)
        secure = secure_facts(federation, rows, one_operator=self.parts.engine.one_operator)
        spends = summarise_privacy(federation, rows, self._state)
        content = privacy_file(federation, spends, secure)
        privacy = PrivacySummary(spends, content) if spends else None
        last: dict[str, Any] = {**rows[-1]} if rows else {}
        metrics: dict[str, Any] = numbers_of(last, ("test_", "clients_"))
        card = self._model_card(content["statement"])
        directory.write_model(federation.saved_values(self._state.model), card.to_metadata())
        directory.write_text("privacy.json", privacy_text(content))
        directory.write_clients(content["clients"])
        figures = self._write_figures()
        personal = figures.get(PERSONALIZATION)
        # Where participation is secret, times would tell of it.
        is_secret = federation.plan.participation.is_secret
        phases = {} if is_secret else self.parts.phases.seconds
        summary = {
            "name": federation.experiment.name,
            "status": self.status,
            "reason": self.reason,
            "rounds": self._state.round_number,
            **metrics,
            "task": card.task,
            "classes": card.class_names,
            **({} if personal is None else {"personalization": summary_of(personal)}),
            **{name: last[name] for name in COUNTS if name in last},
            "epsilon": privacy.epsilon_statistics if privacy else None,
            "delta": max(spend.delta for spend in spends) if spends else None,
            "seconds": round(seconds, 3),
            "sizes": federation.sizes,
            "setup": {name: round(value, 3) for name, value in phases.items()},
            **({"repeated_failures": repeated} if (repeated := repeated_failures(rows)) else {}),
        }
        directory.write_json("summary.json", summary)
        return RunResult(
            path=directory.path,
            status=self.status,
            reason=self.reason,
            metrics={**metrics, **personal_metrics(summary)},
            privacy=privacy,
            rounds=tuple(rows),
            seconds=seconds,
            base=federation.base,
            model_name=federation.experiment.model.name,
        )

    def _write_figures(self) -> dict[str, dict[str, Any]]:
        """Write the files of figures that the run has, and return their content by name."""
        run = EndedRun(self.federation, self._state, self.status, self._model_metrics)
        contents: dict[str, dict[str, Any]] = {}
        for figure in FIGURES:
            self.directory.remove(figure.name)  # a resumed run may not have it again
            content = figure.content(run)
            if content is not None:
                contents[figure.name] = {"schema": SCHEMAS[figure.name], **content}
                self.directory.write_json(figure.name, contents[figure.name])
        return contents

    @property
    def _model_metrics(self) -> dict[str, Any]:
        """Metrics of the final model: an interrupted round has a line, but no model."""
        rows = self._rows[: self._state.round_number]
        return public_metrics(cast(dict[str, Any], rows[-1])) if rows else {}

    def _model_card(self, statement: str) -> ModelCard:
        data, experiment = self.federation.data, self.federation.experiment
        task, derived = self.federation.model.task, experiment.saves_derived_model
        return ModelCard(
            input_shape=data.input_shape,
            num_outputs=task.num_outputs,
            raw_input_shape=data.raw_input_shape,
            task=task.name,
            class_names=data.class_names,
            columns=data.columns,
            experiment=experiment.name,
            rounds=self._state.round_number,
            metrics=self._model_metrics,
            statement=statement,
            fedsim=fedsim.__version__,
            values=digest(self._state.model) if derived else None,
        )


def _default_path(loaded: LoadedExperiment) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = Path("runs") / f"{loaded.experiment.name}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())

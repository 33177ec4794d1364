"""Progress of a run: phases and rounds in a terminal and without one."""

import io
import threading

import pytest
from rich.console import Console

import fedsim
from fedsim.core.commands import Phases
from fedsim.experiment import load_experiment
from fedsim.report import progress
from fedsim.report.progress import PhaseDisplay, ProgressCallback
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.simulation.engine import Engine
from fedsim.simulation.engines import LocalEngine
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.replay import replay_run

EXPERIMENT = {
    "name": "phases",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


SETUP = [
    "loading the data",
    "checking the model",
    "calibrating noise",
    "checking noise and clipping",
]


class Listener(ProgressCallback):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.heard: list[str] = []

    def phase(self, name: str) -> None:
        self.heard.append(name)
        super().phase(name)

    def started(self, federation, path) -> None:
        self.heard.append("started")
        super().started(federation, path)

    def ended(self) -> None:
        self.heard.append("ended")
        super().ended()


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def shown(one: Console) -> str:
    assert isinstance(one.file, io.StringIO)
    return one.file.getvalue()


def test_a_run_tells_its_phases_and_records_the_setup(tmp_path):
    observer = Listener(console(terminal=True))
    fedsim.run(EXPERIMENT, out=tmp_path / "run", callback=observer)
    after = ["computing the results", "writing the report"]
    assert observer.heard == [*SETUP, "", "started", "ended", *after, ""]
    summary = RunDirectory(tmp_path / "run").read_json("summary.json")
    assert list(summary["setup"]) == SETUP
    assert "checking the model" in shown(observer._console)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "of it set-up" in page
    assert ">checking the model<" in page


class OtherProcess(Engine):
    """An engine that has to start something first."""

    def execute(self, server_app, client_app, num_nodes) -> None:
        LocalEngine().execute(server_app, client_app, num_nodes)


def test_an_engine_that_has_to_start_is_a_phase(tmp_path):
    observer = Listener(console(terminal=True))
    run_experiment(EXPERIMENT, out=tmp_path / "run", callback=observer, engine=OtherProcess())
    assert observer.heard[4:7] == ["", "starting the engine", ""]


def test_a_phase_that_fails_is_closed(tmp_path):
    observer = Listener(console(terminal=True))
    wrong = {**EXPERIMENT, "local": {"steps": 1, "batch_size": 10**6}}
    with pytest.raises(ValueError, match="batch_size"):
        fedsim.run(wrong, out=tmp_path / "run", callback=observer)
    assert observer.heard == ["loading the data", ""]


def test_without_a_terminal_only_a_long_phase_gets_a_line():
    patient, hasty = console(terminal=False), console(terminal=False)
    display = PhaseDisplay(patient, patience=3600.0)
    display.show("checking the model")
    display.show("")
    assert shown(patient) == ""
    display = PhaseDisplay(hasty, patience=0.0)
    display.show("checking the model")
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer) and hasty in timer.args:
            timer.join()
    assert shown(hasty) == "checking the model ...\n"


def test_the_time_left_counts_down(tmp_path, monkeypatch):
    now, out = 100.0, console(terminal=False)
    monkeypatch.setattr(progress, "monotonic", lambda: now)

    class SlowRounds(ProgressCallback):
        def round_finished(self, row) -> None:
            nonlocal now
            now += 12.0
            super().round_finished(row)

    fedsim.run(EXPERIMENT, callback=SlowRounds(out), out=tmp_path / "run")
    assert "round 1/2, 12 s left  " in shown(out)
    assert "round 2/2  " in shown(out)
    assert progress._left_text(now + 125) == "2 min 5 s left"
    assert progress._left_text(now + 3 * 3600 + 240) == "3 h 4 min left"


def test_a_replay_tells_its_rounds(tmp_path):
    fedsim.run(EXPERIMENT, out=tmp_path / "run")
    announced: list[str] = []
    replay_run(RunDirectory.open(tmp_path / "run"), phases=Phases(announced.append))
    rounds = ["replaying round 1 of 2", "replaying round 2 of 2"]
    assert announced == [*SETUP[:3], *rounds]


@pytest.mark.slow
def test_an_audit_tells_its_clients():
    announced: list[str] = []
    audit_experiment(
        load_experiment(EXPERIMENT), clients=1, steps=20, phases=Phases(announced.append)
    )
    assert announced[:3] == SETUP[:3]
    assert announced[3].startswith("auditing client ")
    assert announced[4:6] == ["", "comparing with the claims"]

"""Ctrl-C and SIGTERM, at any moment: a summary, the command that resumes, 130 or 143.

The signal is sent by the process to itself at a named place, so no moment is guessed.
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from fedsim.cli import main
from fedsim.core.commands import Interruption
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

EXPERIMENT: dict[str, Any] = {
    "name": "stop",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
SAME = ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("whole") / "r").path


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Restore the handlers of the suite: an interrupted program ignores later signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


PLACES = {
    "training": "fedsim.clients.client_round.block_of",
    "row": "fedsim.runs.files.LinesFile.append",
    "checkpoint": "fedsim.runs.directory.RunDirectory.write_checkpoint",
    "creation": "fedsim.runs.runner.describe_environment",
    "model": "fedsim.runs.directory.RunDirectory.write_model",
    "clients": "fedsim.runs.directory.RunDirectory.write_clients",
    "manifest": "fedsim.runs.runner.write_manifest",
    "report": "fedsim.report.html.render_report",
}


def signals_at(
    monkeypatch: pytest.MonkeyPatch, place: str, number: signal.Signals, *, times: int = 1
) -> None:
    """Send the signal to this process in the second round, or at the first call of a function."""
    owner_name, _, name = PLACES[place].rpartition(".")
    owner: Any = resolve_name(owner_name)
    original, calls = getattr(owner, name), []

    def signalling(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == {"training": 2, "row": 4, "checkpoint": 2}.get(place, 1):
            for _ in range(times):
                os.kill(os.getpid(), number)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, signalling)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("training", signal.SIGTERM),
        ("report", signal.SIGINT),
        *(
            pytest.param(place, number, marks=pytest.mark.slow)
            for place, number in (
                ("row", signal.SIGINT),
                ("checkpoint", signal.SIGTERM),
                ("model", signal.SIGINT),
                ("clients", signal.SIGTERM),
                ("manifest", signal.SIGINT),
            )
        ),
    ],
)
def test_a_signal_at_any_moment_ends_in_a_summary_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    whole: Path,
    place: str,
    number: signal.Signals,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.json").write_text(json.dumps(EXPERIMENT))
    with monkeypatch.context() as patch:
        signals_at(patch, place, number)
        code = command(patch, "run", "e.json", "--out", "r", "--quiet")
    said = capsys.readouterr().err
    assert code == 128 + number
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert Path("r/report.html").exists()
    assert "Traceback" not in said
    resume = said.strip().splitlines()[-1].partition("to go on: fedsim ")[2]
    assert resume == "run e.json --out r --resume"
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, signal.default_int_handler)
    assert command(monkeypatch, *shlex.split(resume), "--quiet") == 0
    for name in SAME:
        assert Path("r", name).read_bytes() == (whole / name).read_bytes(), name
    assert verify_run(RunDirectory.open(Path("r"))).problems == ()


@pytest.mark.parametrize("place", ["training", "model", "report"])
def test_a_second_signal_does_not_disturb_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.json").write_text(json.dumps(EXPERIMENT))
    with monkeypatch.context() as patch:
        signals_at(patch, "training", signal.SIGINT, times=3)
        if place != "training":
            signals_at(patch, place, signal.SIGTERM)
        assert command(patch, "run", "e.json", "--out", "r", "--quiet") == 130
    assert json.loads(Path("r/summary.json").read_text())["status"] == "interrupted"
    assert verify_run(RunDirectory.open(Path("r"))).problems == ()


def test_before_there_is_a_run_directory_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.json").write_text(json.dumps(EXPERIMENT))
    signals_at(monkeypatch, "creation", signal.SIGTERM)
    assert command(monkeypatch, "run", "e.json", "--out", "r", "--quiet") == 143
    assert capsys.readouterr().err == (
        "terminated by SIGTERM during the set-up; nothing was written, so run the same "
        "command again\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]


def test_an_interrupt_that_library_code_lost_ends_the_run_after_the_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedsim.runs.files import LinesFile

    monkeypatch.chdir(tmp_path)
    Path("e.json").write_text(json.dumps(EXPERIMENT))
    append, calls = LinesFile.append, []

    def loses_it(file: LinesFile, line: str) -> None:
        calls.append(line)
        if len(calls) == 1:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                calls.append("lost")
        append(file, line)

    monkeypatch.setattr(LinesFile, "append", loses_it)
    assert command(monkeypatch, "run", "e.json", "--out", "r", "--quiet") == 130
    assert json.loads(Path("r/summary.json").read_text())["rounds"] == 1


def test_a_library_installs_no_handlers(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_experiment(EXPERIMENT, overrides={"federation.rounds": 1}, out=tmp_path / "r")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ignored_signal_stays_ignored() -> None:
    """As after nohup, or in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interruption = Interruption()
    with interruption.handling():
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.received is None

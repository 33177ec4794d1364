"""One process writes a run directory; the second one gets one line, and changes nothing."""

import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsim.cli import main
from fedsim.core.errors import ExitCode
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import LOCK, RunInUseError, RunLock, refuse_in_use
from fedsim.runs.runner import run_experiment
from fedsim.tracking.callbacks import RunCallback

pytest.importorskip("fcntl", reason="a platform without file locks has one process")

EXPERIMENT: dict[str, Any] = {
    "name": "lock",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def files(run: Path) -> dict[str, bytes]:
    """Return every file of a run but the lock."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path != run / LOCK
    }


class DuringARound:
    """An observer that calls a function after round 1, while the run is going on."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def started(self, federation: object, path: Path) -> None: ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        if row["round"] == 1:
            self._call()

    def ended(self) -> None: ...


def test_a_second_process_is_refused_by_the_name_of_the_first_and_touches_nothing(
    tmp_path: Path,
) -> None:
    run = tmp_path / "r"
    said = []

    def second() -> None:
        before = files(run)
        for resume in (True, False):
            with pytest.raises(RunInUseError) as refused:
                run_experiment(EXPERIMENT, out=run, resume=resume)
            said.append(str(refused.value))
            assert refused.value.exit_code == ExitCode.FAILED
        with pytest.raises(RunInUseError):
            refuse_in_use(run)
        assert files(run) == before

    run_experiment(EXPERIMENT, out=run, callback=DuringARound(second))
    me = f"process {os.getpid()} on {platform.node()}, since "
    assert len(said) == 2
    assert all(me in line and "\n" not in line for line in said)
    assert not (run / LOCK).exists(), "an orderly end removes it"
    refuse_in_use(run)


def child(call: Callable[[], object]) -> int:
    """Call a function in a forked process, and return its exit code."""
    number = os.fork()
    if number == 0:
        code = 99
        try:
            call()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def test_the_second_process_of_the_command_line_gets_one_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process in earnest: the lock is that of the operating system."""
    run, me = tmp_path / "r", os.getpid()
    (tmp_path / "e.json").write_text(json.dumps(EXPERIMENT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", "e.json", "--out", "r", "--resume"])
    codes = []

    def command() -> None:
        with open("out", "w") as sys.stdout, open("err", "w") as sys.stderr:
            main()

    run_experiment(EXPERIMENT, out=run, callback=DuringARound(lambda: codes.append(child(command))))
    assert codes == [1]
    assert Path("out").read_text() == ""
    (line,) = Path("err").read_text().splitlines()
    assert f"r is in use by process {me} on " in line


def test_of_two_new_runs_with_the_same_directory_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no directory, and both are about to give theirs the name."""
    run = tmp_path / "r"
    replace, losers = os.replace, []

    def both(source: Path, target: Path) -> None:
        if Path(target) == run and not losers:
            losers.append(source)
            monkeypatch.setattr(os, "replace", replace)
            winner = RunDirectory(run)
            winner.create(experiment="first", environment={}, inputs={})
            try:
                replace(source, target)
            finally:
                assert (run / "experiment.yaml").read_text() == "first"
        replace(source, target)

    monkeypatch.setattr(os, "replace", both)
    with pytest.raises(RunInUseError, match=f"in use by process {os.getpid()} on"):
        run_experiment(EXPERIMENT, out=run)
    assert (run / "experiment.yaml").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["r"], "the loser leaves nothing"


def test_the_lock_of_a_killed_process_is_no_obstacle(
    stop_after: Callable[[int], RunCallback], tmp_path: Path
) -> None:
    run = tmp_path / "r"
    run_experiment(EXPERIMENT, out=run, callback=stop_after(1))
    (run / LOCK).write_text('{"pid": 1, "host": "gone", "started": "then"}')
    refuse_in_use(run)
    assert run_experiment(EXPERIMENT, out=run, resume=True).status == "completed"


def test_a_lock_file_that_was_removed_between_open_and_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a third process would make a new file, and two would hold "the" lock."""
    import fcntl

    (tmp_path / "checkpoint").mkdir()
    first = RunLock(tmp_path)
    flock, calls = fcntl.flock, []

    def ends_just_before(descriptor: int, operation: int) -> None:
        if not calls:
            calls.append(operation)
            first.close()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", ends_just_before)
    second = RunLock(tmp_path)
    assert second.is_held
    with pytest.raises(RunInUseError):
        RunLock(tmp_path)
    second.close()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()

    def killed() -> None:
        lock = RunLock(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL if lock.is_held else signal.SIGTERM)

    assert child(killed) == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    with closing(RunLock(tmp_path)):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    shutil.rmtree(tmp_path / "checkpoint")

"""Every error at a file is one line and exit 1; damaged state is never accepted."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError, JournalWriteError
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger
from fedsim.cli import main
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.server.secure.opened_sums import OpenedSum
from fedsim.tracking.callbacks import ForwardingCallback, RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "disk",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
SAME = ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl", "experiment.yaml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("whole") / "r").path


@pytest.fixture(scope="module")
def stopped(
    stop_after: Callable[[int], RunCallback], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run after two of three rounds."""
    path = tmp_path_factory.mktemp("stopped") / "r"
    run_experiment(EXPERIMENT, out=path, callback=stop_after(2))
    (path / "manifest.json").unlink()  # as after a kill; with it, any changed byte is refused
    return path


def test_a_ledger_that_changes_during_the_run_is_in_no_summary(tmp_path: Path) -> None:
    """The accounts in memory are right, and the summary speaks of the file."""
    path = tmp_path / "r"

    class Changed(ForwardingCallback):
        def round_finished(self, row: Mapping[str, Any]) -> None:
            ledger = path / "ledger.jsonl"
            if row["round"] == 2:
                ledger.write_text(ledger.read_text().replace('"steps":1', '"steps":0', 1))

    with pytest.raises(JournalError, match="the record was changed"):
        run_experiment(EXPERIMENT, out=path, callback=Changed(None))
    assert not (path / "privacy.json").exists()


class FullDisk:
    """Refuses the k-th fsync, and every later one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.count = 0
        self._at, self._fsync = at, os.fsync
        monkeypatch.setattr(os, "fsync", self._counted)

    def _counted(self, descriptor: int) -> None:
        self.count += 1
        if self.count >= self._at:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(descriptor)


@pytest.mark.parametrize(  # a run for each; the next test is one of them
    "every", [pytest.param(5, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_a_full_disk_at_every_fsync_is_one_line_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole: Path, every: int
) -> None:
    with monkeypatch.context() as patch:
        counted = FullDisk(patch, at=10**9)
        run_experiment(EXPERIMENT, out=tmp_path / "counted")
    for at in range(1, counted.count + 1, every):
        run = tmp_path / f"run-{at}"
        with monkeypatch.context() as patch:
            FullDisk(patch, at)
            with pytest.raises(FedsimError) as refused:
                run_experiment(EXPERIMENT, out=run)
        said = str(refused.value)
        assert refused.value.exit_code == ExitCode.FAILED
        assert "No space left on device" in said
        assert "\n" not in said
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        run_experiment(EXPERIMENT, out=run, resume=run.exists())
        for name in SAME:
            assert (run / name).read_bytes() == (whole / name).read_bytes(), (at, name)


def test_a_charge_that_the_disk_refused_ends_the_run_before_the_round_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the clients would merely fail, and the run would go on to another model."""
    write, calls = FileJournal._write, []

    def full(journal: FileJournal, charges: Any) -> None:
        calls.append(charges)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(journal, charges)

    monkeypatch.setattr(FileJournal, "_write", full)
    with pytest.raises(RunFailedError) as failed:
        run_experiment(EXPERIMENT, out=tmp_path / "r")
    assert "round 2: ledger.jsonl: No space left on device" in str(failed.value)
    assert failed.value.result.status == "failed"
    assert [len(row["participants"]) for row in failed.value.result.rounds] == [3, 0]


def test_after_a_refused_write_a_journal_writes_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later fsync may succeed although the earlier pages are lost."""
    journal = FileJournal(tmp_path / "ledger.jsonl")
    charge = Charge(0, 1, "r", 1, PrivacyLedger(), "0" * 64)
    with monkeypatch.context() as patch:
        FullDisk(patch, at=1)
        with pytest.raises(JournalWriteError, match=r"ledger\.jsonl: No space left"):
            journal.append(charge)
    with pytest.raises(JournalWriteError):
        journal.append(charge)


FILES = (
    "ledger.jsonl",
    "rounds.jsonl",
    "experiment.yaml",
    "environment.json",
    "checkpoint/model.safetensors",
    "checkpoint/inputs.json",
)


def damages(data: bytes) -> Mapping[str, bytes | None]:
    """Return the content of a file after each kind of damage; None: the file is gone."""
    places = range(0, len(data), max(1, len(data) // 6))
    return {
        "removed": None,
        "emptied": b"",
        "half": data[: len(data) // 2],
        "without its end": data[:-1],
        "zeros": bytes(len(data)),
        "zeros at its end": data[:-60] + bytes(60),
        "an object": b"{}\n",
        "a list": b"[]\n",
        "a number": b"7\n",
        "not Unicode": b"\xff\xfe" + data,
        "deep": b"[" * 100_000,
        **{f"bit {at}": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in places},
    }


def refusal(run: Path) -> str | None:
    """Resume a run; return the message of the refusal, None if it was not refused."""
    try:
        run_experiment(EXPERIMENT, out=run, resume=True)
    except FedsimError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_or_makes_no_difference(
    stopped: Path, whole: Path, tmp_path: Path, name: str
) -> None:
    refused = 0
    for what, data in damages((stopped / name).read_bytes()).items():
        run = Path(shutil.copytree(stopped, tmp_path / "r"))
        (run / name).unlink() if data is None else (run / name).write_bytes(data)
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        said = refusal(run)
        if said is None:
            for result in SAME:
                assert (run / result).read_bytes() == (whole / result).read_bytes(), (what, result)
        else:
            refused += 1
            assert "\n" not in said, what
            assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before, what
        shutil.rmtree(run)
    assert refused >= 8


def test_a_last_line_of_zeros_after_a_power_loss_is_a_round_that_was_not_finished(
    stopped: Path, whole: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "r"))
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(bytes(300))
    run_experiment(EXPERIMENT, out=run, resume=True)
    for name in SAME:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(clients=[0, 1]),
        lambda found: found.update(round=1),
        lambda found: found.update(clients="0"),
        lambda found: found.pop("digest"),
        lambda found: found.clear(),
    ],
)
def test_a_changed_record_of_the_opened_sum_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    directory.write_opening(OpenedSum(2, (0, 1, 2)))
    path = tmp_path / "checkpoint" / "opening.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(FedsimError, match=r"opening\.json: the file is damaged") as refused:
        directory.read_opening()
    assert refused.value.exit_code == ExitCode.FAILED


def test_a_directory_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.json").write_text(json.dumps(EXPERIMENT))
    Path("file").write_text("")
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", "e.json", "--out", "file/r", "--quiet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "file" in said
    assert "nothing of the run was written" in said

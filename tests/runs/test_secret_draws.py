"""Runs whose clients are drawn in secret: after a crash, on every engine, verified and replayed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.ledger.journal import FileJournal, JournalWriteError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.aggregation import noisy_sum
from fedsim.tools.replay import replay_run

CLIENTS = 6
EXPERIMENT: dict[str, Any] = {
    "name": "drawn",
    "seed": 3,
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
    "model": {"name": "mlp", "args": {"hidden": [50]}},  # a larger one is probed in fewer rounds
    "federation": {
        "rounds": 3,
        "clients_per_round": 2,
        "participation": {"scheme": "poisson"},
    },
    "local": {"steps": 2, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "trust": "central",
        "unit": "client",
        "noise_multiplier": 1.0,
        "delta": 1e-2,
        "max_update_norm": 0.5,
    },
}
pytestmark = pytest.mark.slow


class _KilledError(Exception):
    """The process ended here."""


def run(out: Path, *, resume: bool = False, **overrides: Any) -> Any:
    return run_experiment(EXPERIMENT, overrides=overrides, out=out, resume=resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("drawn") / "whole")


def killed_run(out: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> None:
    """Run until the noise of the second round was drawn."""
    add_noise, rounds = noisy_sum.add_noise, list[int]()

    def dying(sums: Any, source: Any) -> Any:
        rounds.append(1)
        drawn = add_noise(sums, source)
        if len(rounds) == 2:
            raise _KilledError
        return drawn

    with monkeypatch.context() as patched:
        patched.setattr(noisy_sum, "add_noise", dying)
        with pytest.raises(_KilledError):
            run(out, **overrides)


def model_of(result: Any) -> bytes:
    return b"".join(value.numpy().tobytes() for value in result.model().state_dict().values())


def test_a_killed_run_resumes_to_the_same_bits_and_charges(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_run(tmp_path / "r", monkeypatch)
    resumed = run(tmp_path / "r", resume=True)
    assert model_of(resumed) == model_of(whole)
    ledger = (tmp_path / "r" / "ledger.jsonl").read_bytes()
    assert ledger == (whole.path / "ledger.jsonl").read_bytes()
    assert not verify_run(RunDirectory.open(tmp_path / "r")).problems
    assert not replay_run(RunDirectory.open(tmp_path / "r")).problems


def test_a_crash_in_the_middle_of_the_charges_charges_the_other_clients(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_run(tmp_path / "r", monkeypatch)
    ledger = tmp_path / "r" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * CLIENTS
    ledger.write_bytes(b"".join(lines[: CLIENTS + 2]) + lines[CLIENTS + 2][:40])
    (tmp_path / "r" / "manifest.json").unlink()  # a process that is killed writes none
    resumed = run(tmp_path / "r", resume=True)
    assert model_of(resumed) == model_of(whole)
    journal = FileJournal(ledger)
    assert [len(journal.history(client)) for client in range(CLIENTS)] == [3] * CLIENTS


def test_noise_of_the_operating_system_charges_everybody_for_a_repeated_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = {"privacy.noise": "secure"}
    killed_run(tmp_path / "r", monkeypatch, **secure)
    run(tmp_path / "r", resume=True, **secure)
    journal = FileJournal(tmp_path / "r" / "ledger.jsonl")
    for client in range(CLIENTS):
        assert [one.round_number for one in journal.history(client)] == [1, 2, 2, 3]
    assert not verify_run(RunDirectory.open(tmp_path / "r")).problems


def test_a_full_disk_ends_the_run_before_anything_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, charges: Any) -> None:
        raise JournalWriteError("ledger.jsonl: no space left")

    monkeypatch.setattr(FileJournal, "append_all", full)
    with pytest.raises(RunFailedError, match=r"no client was charged: .*no space left"):
        run(tmp_path / "r")
    assert (tmp_path / "r" / "rounds.jsonl").read_text() == ""


def test_a_lost_charge_of_a_client_is_found(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "r")
    ledger = tmp_path / "r" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    problems = verify_run(RunDirectory.open(tmp_path / "r")).problems
    assert any("every client is charged for every round" in one for one in problems)


@pytest.mark.usefixtures("shared_ray")
def test_a_worker_gives_the_same_model_and_charges(whole: Any, tmp_path: Path) -> None:
    there = run(tmp_path / "ray", runtime={"engine": "ray", "workers": 1})
    assert model_of(whole) == model_of(there)
    assert whole.privacy.system_epsilon == there.privacy.system_epsilon

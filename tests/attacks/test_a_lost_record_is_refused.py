"""A run whose records were lost, shortened or replaced is not resumed: nothing un-spends."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsim.core.errors import ExitCode, FedsimError
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.resume import contradictions
from fedsim.runs.runner import run_experiment
from fedsim.tracking.callbacks import RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "lost",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 4, "clients_per_round": 2},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
CHECKPOINT = "checkpoint/model.safetensors"


@pytest.fixture(scope="module")
def stopped(
    stop_after: Callable[[int], RunCallback], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run after three of four rounds, with the checkpoints of rounds 1, 2 and 3 beside it."""
    path = tmp_path_factory.mktemp("stopped")
    run_experiment(EXPERIMENT, out=path / "r", callback=stop_after(1))
    for number in (1, 2, 3):
        if number > 1:
            run_experiment(EXPERIMENT, out=path / "r", resume=True, callback=stop_after(number))
        for name in (CHECKPOINT, "rounds.jsonl", "ledger.jsonl"):
            shutil.copy(path / "r" / name, path / f"{Path(name).name}-{number}")
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped / "r", tmp_path / "r"))


def without_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    del lines[number]
    path.write_text("".join(lines))


def edit_checkpoint(run: Path, **changes: Any) -> None:
    """Write a checkpoint with other content and the digest that belongs to it."""
    directory = RunDirectory(run)
    found = directory.read_checkpoint()
    assert found is not None
    state = found.state
    for name, value in changes.items():
        state = type(state)(**{**vars(state), name: value})
    directory.write_checkpoint(replace(found, state=state))


def with_another_tag(path: Path) -> None:
    """Change one digit of an upload's tag: replay would accuse an honest client."""
    row, *others = path.read_text().splitlines(keepends=True)
    tag = next(iter(json.loads(row)["uploads"].values()))
    path.write_text(row.replace(tag, f"{int(tag, 16) ^ 1:032x}") + "".join(others))


LOST: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "another tag of an upload": (
        lambda run, _: ((run / "manifest.json").unlink(), with_another_tag(run / "releases.jsonl")),
        "releases.jsonl was changed up to round 3",
    ),
    "no ledger": (lambda run, _: (run / "ledger.jsonl").unlink(), "ledger.jsonl: the file is"),
    "an empty ledger": (
        lambda run, _: (run / "ledger.jsonl").write_text(""),
        "ledger.jsonl lacks the charge of client",
    ),
    "a ledger without its last record": (
        lambda run, _: without_line(run / "ledger.jsonl", -1),
        "ledger.jsonl lacks the charge of client",
    ),
    "an older ledger": (
        lambda run, old: shutil.copy(old / "ledger.jsonl-2", run / "ledger.jsonl"),
        "ledger.jsonl lacks the charge of client",
    ),
    "no rounds": (lambda run, _: (run / "rounds.jsonl").unlink(), "rounds.jsonl: the file is"),
    "fewer rounds": (
        lambda run, _: without_line(run / "rounds.jsonl", -1),
        "has 2 rounds, and the checkpoint is that of round 3",
    ),
    "a round in the middle": (
        lambda run, _: without_line(run / "rounds.jsonl", 1),
        "are not 1, 2, 3",
    ),
    "an older ledger and older rounds": (
        lambda run, old: [
            shutil.copy(old / f"{name}-2", run / name) for name in ("ledger.jsonl", "rounds.jsonl")
        ],
        "has 2 rounds, and the checkpoint is that of round 3",
    ),
    "no checkpoint": (
        lambda run, _: (run / CHECKPOINT).unlink(),
        "has 3 rounds, and the checkpoint is that of round 0",
    ),
    "an older checkpoint": (
        lambda run, old: shutil.copy(old / "model.safetensors-1", run / CHECKPOINT),
        "has 3 rounds, and the checkpoint is that of round 1",
    ),
    "a checkpoint of a round that never was": (
        lambda run, _: edit_checkpoint(run, round_number=1002),
        "has 3 rounds, and the checkpoint is that of round 1002",
    ),
    "rounds and checkpoint are older than the ledger": (
        lambda run, old: [
            shutil.copy(old / "rounds.jsonl-1", run / "rounds.jsonl"),
            shutil.copy(old / "model.safetensors-1", run / CHECKPOINT),
        ],
        "has 1 rounds, and releases.jsonl 3",
    ),
    "rounds, releases and checkpoint are older than the ledger": (
        lambda run, old: [
            shutil.copy(old / "rounds.jsonl-1", run / "rounds.jsonl"),
            shutil.copy(old / "model.safetensors-1", run / CHECKPOINT),
            without_line(run / "releases.jsonl", -1),
            without_line(run / "releases.jsonl", -1),
        ],
        "goes on to round 3",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_run_with_lost_records_is_refused_before_anything_is_written(
    run: Path, stopped: Path, name: str
) -> None:
    lose, said = LOST[name]
    lose(run, stopped)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(FedsimError) as refused:
        run_experiment(EXPERIMENT, out=run, resume=True)
    assert refused.value.exit_code == ExitCode.FAILED
    assert said in str(refused.value)
    assert "restore the run directory from a copy" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_participation_without_its_charge_is_found_where_the_chain_is_whole(run: Path) -> None:
    """The ledger of an attacker who also rewrote the checkpoint, whose heads fit."""
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    gone = json.loads(lines[-1])
    without_line(run / "ledger.jsonl", -1)
    directory = RunDirectory(run)
    found = directory.read_checkpoint()
    assert found is not None
    heads = {**found.heads, gone["client"]: gone["previous"]}
    if not gone["previous"].strip("0"):
        del heads[gone["client"]]
    directory.write_checkpoint(replace(found, heads=heads))
    assert list(contradictions(RunFiles(directory))) == [
        f"ledger.jsonl lacks the charge of client {gone['client']} in round 3, in which it took "
        "part"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"privacy.noise": "secure"},
        {"privacy": None},
        {"faults": [{"kind": "dropout_after", "clients": [0], "rounds": [1, 3]}]},
        {"faults": [{"kind": "dropout_before", "clients": [1], "rounds": [1, 3]}]},
        {
            "privacy.target_epsilon": 20.0,
            "privacy.on_exhausted": "withdraw",
            "privacy.clients": {"1": {"target_epsilon": 0.3}},
        },
        {"secure_aggregation": {"min_clients": 2}},
    ],
)
def test_an_honest_run_resumes(
    stop_after: Callable[[int], RunCallback], tmp_path: Path, change: dict[str, Any]
) -> None:
    stop = stop_after(3)
    run_experiment(EXPERIMENT, overrides=change, out=tmp_path / "r", callback=stop)
    result = run_experiment(EXPERIMENT, overrides=change, out=tmp_path / "r", resume=True)
    assert result.status == "completed"
    assert not list(contradictions(RunFiles(RunDirectory(tmp_path / "r"))))

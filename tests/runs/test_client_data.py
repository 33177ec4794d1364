"""Figures of private data: what they say, and in which runs they are not written."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import write_manifest
from fedsim.runs.recorded_figures import CLIENT_DATA
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

CLIENTS = 4
EXPERIMENT: dict[str, Any] = {
    "name": "labels",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "shards", "num_clients": CLIENTS, "classes_per_client": 3},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "evaluation": {"holdout": 0.25},
    "privacy": None,
}
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0}


def run(path: Path, **overrides: Any) -> Path:
    return run_experiment(EXPERIMENT, overrides=overrides, out=path).path


def content_of(path: Path) -> dict[str, Any]:
    return json.loads((path / CLIENT_DATA).read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("plain") / "run")


def test_labels_are_those_of_the_partition(plain: Path) -> None:
    found = content_of(plain)
    assert found["classes"] == [str(digit) for digit in range(10)]
    clients = json.loads((plain / "privacy.json").read_text())["clients"]
    for row, client in zip(found["clients"], clients, strict=True):
        both = [a + b for a, b in zip(row["labels"], row["held_out"], strict=True)]
        assert sum(count > 0 for count in both) == 3
        assert sum(row["labels"]) == client["examples"]


def test_correct_predictions_are_those_that_clients_report(plain: Path) -> None:
    rows = content_of(plain)["clients"]
    correct, held_out = (sum(sum(row[key]) for row in rows) for key in ("correct", "held_out"))
    summary = json.loads((plain / "summary.json").read_text())
    assert correct / held_out == pytest.approx(summary["clients_accuracy"], abs=1e-12)


def test_a_run_that_protects_its_clients_has_no_such_file(tmp_path: Path, plain: Path) -> None:
    private = run(tmp_path / "private", evaluation=None, privacy=PRIVACY)
    assert not (private / CLIENT_DATA).exists()
    (private / CLIENT_DATA).write_text((plain / CLIENT_DATA).read_text())
    directory = RunDirectory.open(private)
    write_manifest(directory)
    problems = verify_run(directory).problems
    assert problems == (
        f"{CLIENT_DATA} holds figures of private data, in a run that promises to protect them",
    )


@pytest.mark.slow
def test_secure_sums_and_numbers_have_no_such_file(tmp_path: Path) -> None:
    secure = {"protocol": "additive", "aggregators": 2}
    assert not (
        run(tmp_path / "a", evaluation=None, secure_aggregation=secure) / CLIENT_DATA
    ).exists()
    numbers = {
        "data": {"dataset": "diabetes", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
        "model": {"name": "mlp", "args": {"hidden": [4]}, "loss": "mse"},
    }
    assert not (run(tmp_path / "b", **numbers) / CLIENT_DATA).exists()


def test_counts_that_contradict_the_run_are_found(tmp_path: Path, plain: Path) -> None:
    path = run(tmp_path / "run", evaluation=None)
    content = content_of(path)
    assert "held_out" not in content["clients"][0]
    content["clients"][1]["labels"][0] += 1
    directory = RunDirectory.open(path)
    directory.write_json(CLIENT_DATA, content)
    write_manifest(directory)
    assert verify_run(directory).problems == (
        f"{CLIENT_DATA}: client 1 has other examples than in privacy.json",
    )

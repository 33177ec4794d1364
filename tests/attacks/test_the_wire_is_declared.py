"""What crosses the wire is what an algorithm declares: other arrays are refused before a charge."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsim.algorithms.algorithm import Sent
from fedsim.algorithms.built_in.scaffold import Scaffold
from fedsim.clients.task import ClientScores, ClientTask
from fedsim.experiment import load_experiment
from fedsim.federation.federation import Federation
from fedsim.runs.runner import RunFailedError, run_experiment

OWN = """
from fedsim.algorithms.built_in.fedavg import FedAvg
from fedsim.algorithms.built_in.scaffold import Scaffold

class Hidden(Scaffold):
    wire = ()

class Partial(Scaffold):
    def send(self, state, client):
        return {name: {} for name in super().send(state, client)}

class Later(FedAvg):
    def send(self, state, client):
        return {"probe": {}} if state.round_number > 1 else {}
"""


def experiment(strategy: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "wire",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 3, "strategy": strategy},
        "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Hidden", r"send returned \['correction'\], and wire declares \[\]"),
        ("Partial", "send returned for 'correction' no array for each trained parameter"),
        ("Later", r"send returned \['probe'\], which `wire` does not declare"),
    ],
)
def test_a_server_that_sends_something_else_ends_the_run(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises((ValueError, RunFailedError), match=message):
        run_experiment(experiment(f"./own.py:{name}"), base=tmp_path, out=tmp_path / "run")


def test_a_client_refuses_arrays_that_its_algorithm_does_not_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Federation.client_task

    def task_of(self: Federation, client: int) -> ClientTask:
        task = honest(self, client)
        sent = () if client == 1 else ("correction",)
        return replace(task, training=replace(task.training, sent=sent))

    monkeypatch.setattr(Federation, "client_task", task_of)
    run = run_experiment(experiment("scaffold"), out=tmp_path / "run")
    (reason,) = {one["reason"] for row in run.rounds for one in row["failed"]}
    assert "the server sends the arrays correction beside the model, and federation" in reason
    assert {one["client"] for row in run.rounds for one in row["failed"]} == {1}
    assert '"client":1' not in (run.path / "ledger.jsonl").read_text(), "not charged"


def test_a_reply_without_a_declared_number_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Federation.client_task

    def task_of(self: Federation, client: int) -> ClientTask:
        task = honest(self, client)
        return replace(task, scores=ClientScores()) if client == 2 else task

    monkeypatch.setattr(Federation, "client_task", task_of)
    run = run_experiment(experiment("qfedavg", privacy=None), out=tmp_path / "run")
    assert {one["reason"] for row in run.rounds for one in row["failed"]} == {
        "the reply needs the finite number 'loss' that federation.strategy declares, got None"
    }


def test_a_private_number_is_refused_with_privacy_whoever_declares_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from fedsim.algorithms.algorithm import Sent\n"
        "from fedsim.algorithms.built_in.fedavg import FedAvg\n"
        "class Own(FedAvg):\n"
        "    wire = (Sent('loss', 'server', 'private', 'number'),)\n"
    )
    own = experiment("./own.py:Own")
    load_experiment(own, base=tmp_path)
    with pytest.raises(ValueError, match="needs each client's loss, a function of its examples"):
        run_experiment(own, base=tmp_path, out=tmp_path / "run")


def test_what_goes_to_clients_is_post_processing() -> None:
    assert Scaffold.wire == (Sent("correction", "clients", "post_processing"),)

"""No client has another weight than the plan, in plain averages and in secure sums."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsim.clients.task import ClientTask
from fedsim.federation.federation import Federation
from fedsim.protocol.errors import FederationError
from fedsim.protocol.flower_internals import server_identity
from fedsim.runs.runner import run_experiment
from fedsim.simulation.engines import LocalEngine, LocalGrid

LIAR = 1
SLOW_CASES = [("additive", 5000), ("secagg", 1), ("secagg", 5000)]
PRIVACY = {
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "max_grad_norm": 0.5,
    "clients": {"0": {"noise_multiplier": 4.0}},
}


class _Line(LocalEngine):
    """The local engine over messages; replies of the liar say that it has more examples."""

    def execute(self, server_app: Any, client_app: Any, num_nodes: int) -> None:
        def lying(message: Message, context: Any) -> Message:
            reply = client_app(message, context)
            liar = context.node_config.get("partition-id") == LIAR
            metrics = reply.content.metric_records.get("metrics") if liar else None
            if metrics is not None:
                metrics["num-examples"] = 10 * metrics["num-examples"]
            return reply

        with server_identity(1):
            server_app(LocalGrid(cast("ClientApp", lying), num_nodes), None)


def experiment(**sections: Any) -> dict[str, Any]:
    return {
        "name": "weights",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 1, "weighting": "examples_over_noise"},
        "local": {"steps": 1, "batch_size": "full"},
        "privacy": PRIVACY,
        **sections,
    }


def lie_of_a_client(monkeypatch: pytest.MonkeyPatch, **lie: Any) -> None:
    """Let the liar's task differ from what the federation planned for it."""
    honest = Federation.client_task

    def task_of(self: Federation, client: int) -> ClientTask:
        task = honest(self, client)
        if client != LIAR:
            return task
        if "weight" in lie:
            return replace(task, weight=lie["weight"])
        assert task.secure is not None
        weights = list(task.secure.weights)
        weights[LIAR] += lie["more"]
        return replace(task, secure=replace(task.secure, weights=tuple(weights)))

    monkeypatch.setattr(Federation, "client_task", task_of)


@pytest.mark.parametrize("weighting", ["examples", "examples_over_noise"])
def test_a_client_that_reports_more_examples_is_left_out(tmp_path: Path, weighting: str) -> None:
    federation = {"rounds": 1, "weighting": weighting}
    result = run_experiment(experiment(federation=federation), out=tmp_path / "run", engine=_Line())
    (row,) = result.rounds
    assert row["participants"] == [0, 2, 3]
    (failed,) = row["failed"]
    assert failed["client"] == LIAR
    assert "its weight was planned for" in failed["reason"]


@pytest.mark.parametrize(
    ("protocol", "more"),
    [("additive", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_a_secure_sum_with_another_weight_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, more: int
) -> None:
    lie_of_a_client(monkeypatch, more=more)
    sections = experiment(secure_aggregation={"protocol": protocol, "on_abort": "skip_round"})
    result = run_experiment(sections, out=tmp_path / "run")
    (row,) = result.rounds
    assert row["participants"] == []
    assert "a client took another weight" in row["secure_aggregation"]["aborted"]


def test_a_client_that_plans_another_weight_refuses_before_it_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node whose file or data differ from the server's."""
    lie_of_a_client(monkeypatch, weight=7)
    result = run_experiment(experiment(), out=tmp_path / "run")
    (row,) = result.rounds
    assert [failed["client"] for failed in row["failed"]] == [LIAR]
    failed = row["failed"][0]
    assert "and this client weight 7 (federation.weighting)" in failed["reason"]
    charged = {line.split('"client":')[1].split(",")[0].strip() for line in ledger(result.path)}
    assert charged == {"0", "2", "3"}


def ledger(run: Path) -> list[str]:
    return (run / "ledger.jsonl").read_text().splitlines()


def test_noise_weights_are_refused_where_a_client_adds_none(tmp_path: Path) -> None:
    privacy = {**PRIVACY, "clients": {"0": {"noise_multiplier": 0.0}}}
    with pytest.raises((ValueError, FederationError), match="client 0, which adds no noise"):
        run_experiment(experiment(privacy=privacy), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

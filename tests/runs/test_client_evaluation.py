"""Clients score the global model on examples that they never train on, and only without privacy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import fedsim
from fedsim.clients import app
from fedsim.clients.faults import ClientFailureError
from fedsim.data.load import split_client
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import EvaluateRequest
from fedsim.runs.runner import run_experiment

PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def experiment(**sections: Any) -> dict[str, Any]:
    return {
        "name": "evaluated",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 5, "min_examples": 5},
        },
        "model": {"name": "mlp", "args": {"hidden": [8]}},
        "federation": {"rounds": 3, "clients_per_round": 3},
        "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": None,
        "evaluation": {"holdout": 0.25},
        **sections,
    }


def assembled(**sections: Any) -> Federation:
    return assemble(load_experiment(experiment(**sections)), ledger=None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [
        {**json.loads(line), "seconds": 0, "timeline": {}}
        for line in (path / "rounds.jsonl").open()
    ]


@given(st.integers(0, 60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_held_out_rows_are_the_clients_own_and_no_training_row(
    n: int, fraction: float, client: int
) -> None:
    own = np.arange(n) * 3
    training, kept = split_client(own, fraction, seed=1, client=client)
    assert sorted([*training, *kept]) == own.tolist()
    assert len(training) >= min(n, 1)
    assert abs(len(kept) - n * fraction) <= 1


def test_the_average_is_that_of_all_held_out_examples(tmp_path: Path) -> None:
    result = fedsim.run(experiment(), out=tmp_path / "run")
    federation = assembled()
    assert federation.data.held_out is not None
    model = federation.model.module
    model.load_state_dict(load_file(str(tmp_path / "run" / "model.safetensors")))
    right, loss, count = 0, 0.0, 0
    for examples in federation.data.held_out:
        x, y = torch.from_numpy(examples.features), torch.from_numpy(examples.targets)
        outputs = model(x)
        right += int((outputs.argmax(dim=1) == y).sum())
        loss += torch.nn.functional.cross_entropy(outputs, y, reduction="sum").item()
        count += len(y)
    last = rows(result.path)[-1]
    assert last["evaluated"] == {"clients": [0, 1, 2, 3, 4], "examples": count, "failed": []}
    assert last["clients_accuracy"] == pytest.approx(right / count, rel=1e-12)
    assert last["clients_loss"] == pytest.approx(loss / count, rel=1e-5)
    assert result.metrics["clients_accuracy"] == last["clients_accuracy"]
    everybody = sum(federation.data.clients.sizes) + count + len(federation.data.test)
    assert everybody == 1797, "what is held out is nobody's to train on"
    assert "held-out accuracy" in (result.path / "report.html").read_text()


def test_evaluation_changes_no_bit_of_training_and_resumes(tmp_path: Path, stop_after: Any) -> None:
    """The same held-out examples, scored or not: scoring leaves nothing behind."""
    often = run_experiment(experiment(), out=tmp_path / "often").path
    seldom = {"evaluation.every_rounds": 3, "evaluation.clients": 2}
    seldom = run_experiment(experiment(), overrides=seldom, out=tmp_path / "seldom").path
    names = "model.safetensors", "ledger.jsonl"
    assert (often / names[0]).read_bytes() == (seldom / names[0]).read_bytes()
    assert [row["evaluated"] is None for row in rows(seldom)] == [True, True, False]
    assert rows(seldom)[2]["clients_loss"] != rows(often)[2]["clients_loss"]
    run_experiment(experiment(), out=tmp_path / "again", callback=stop_after(1))
    again = run_experiment(experiment(), out=tmp_path / "again", resume=True).path
    assert rows(again) == rows(often)


def test_who_is_gone_in_a_round_does_not_evaluate_it(tmp_path: Path) -> None:
    faults = [
        {"kind": "dropout_before", "clients": [1], "rounds": [2]},
        {"kind": "straggler", "clients": [2], "rounds": [2], "delay": 9},
    ]
    federation = {"rounds": 2, "deadline": 5}
    path = run_experiment(experiment(faults=faults, federation=federation), out=tmp_path / "r").path
    first, second = rows(path)
    assert first["evaluated"]["failed"] == []
    assert second["evaluated"]["clients"] == [0, 3, 4]
    assert [one["reason"] for one in second["evaluated"]["failed"]] == [
        "dropped out before training (injected)",
        "answered after 9 s, past the deadline of 5 s",
    ]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"privacy": PRIVATE},
            "evaluation.holdout: a client's score .* that no ε of this experiment",
        ),
        ({"secure_aggregation": {}}, "evaluation.holdout: clients send their scores in clear"),
        (
            {"evaluation": {"holdout": 0.2, "clients": 6}},
            r"evaluation.clients: must be <= .*\(5\), got 6",
        ),
    ],
)
def test_what_would_reveal_more_than_was_promised_is_refused(
    sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ExperimentError, match=why):
        load_experiment(experiment(**sections))


def test_a_private_client_tells_no_score_whoever_asks() -> None:
    """Guarantee of `clients.app.evaluate_and_reply`: also where an experiment let it through."""
    open_task = assembled().client_task(0)
    private = assembled(evaluation=None, privacy=PRIVATE).client_task(0)
    with server_identity(1):
        request = EvaluateRequest(1, assembled().initial_arrays()).to_message(7)
        assert app.evaluate_and_reply(open_task, request).has_content()
        for task in (private, replace(private, scores=open_task.scores)):
            with pytest.raises(ClientFailureError, match="does not evaluate"):
                app.evaluate_and_reply(task, request)
            node = Context(
                run_id=1,
                node_id=7,
                node_config={"partition-id": 0},
                state=RecordDict(),
                run_config={},
            )
            reply = app.BatchClientApp(lambda _, task=task: task)(request, node)
            assert reply.has_error()

"""Runs whose clients take turns, or come and go: their rounds, charges, checks and resumed ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "turns",
    "seed": 2,
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 6}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 6},
    "local": {"steps": 2, "batch_size": 20},
    "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
TRACE = "client,first,last\n0,1,3\n1,1,3\n2,2,2\n3,5,6\n4,6,6\n"


def checked(path: Path) -> RunDirectory:
    directory = RunDirectory.open(path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory).problems == ()
    return directory


def charges(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Return round and steps of each client's charges."""
    journal = FileJournal(path / "ledger.jsonl")
    return {
        client: [(one.round_number, one.steps) for one in journal.history(client)]
        for client in journal.clients()
    }


def test_clients_of_a_trace_are_charged_for_their_rounds_alone(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    settings = {"federation.participation": {"scheme": "trace", "path": "trace.csv"}}
    result = run_experiment(EXPERIMENT, overrides=settings, out=tmp_path / "r", base=tmp_path)
    (tmp_path / "trace.csv").unlink()
    assert result.status == "completed"
    assert [row["participants"] for row in result.rounds] == [
        [0, 1],
        [0, 1, 2],
        [0, 1],
        [],
        [3],
        [3, 4],
    ]
    assert charges(result.path) == {
        0: [(1, 2), (2, 2), (3, 2)],
        1: [(1, 2), (2, 2), (3, 2)],
        2: [(2, 2)],
        3: [(5, 2), (6, 2)],
        4: [(6, 2)],
    }
    assert result.rounds[3]["test_loss"] == result.rounds[2]["test_loss"]  # nobody: no update
    checked(result.path)
    assert result.privacy is not None
    spent = {one.client: one for one in result.privacy.clients}
    assert spent[5].rounds == 0
    # All have one target, and those with fewer rounds add less noise.
    assert spent[0].noise_multiplier > spent[3].noise_multiplier > spent[2].noise_multiplier


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "privacy"),
    [
        ({}, {}),
        ({"secure_aggregation": {"min_clients": 2}, "local.steps": 1}, {"trust": "distributed"}),
        ({"local.steps": 1}, {"trust": "central"}),
        ({}, {"unit": "client", "max_update_norm": 1.0, "max_grad_norm": None}),
    ],
)
def test_groups_take_turns_under_every_trust_model(
    change: dict[str, Any], privacy: dict[str, Any], tmp_path: Path
) -> None:
    own = {**EXPERIMENT["privacy"], **privacy}
    overrides = {
        "federation.participation": {"scheme": "cyclic", "groups": 3},
        "privacy": {key: value for key, value in own.items() if value is not None},
        **change,
    }
    result = run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    assert [row["participants"] for row in result.rounds] == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(len(rounds) == 2 for rounds in charges(result.path).values())
    checked(result.path)


def test_a_resumed_run_keeps_its_trace_and_ends_alike(tmp_path: Path) -> None:
    settings = {
        "federation.participation": {
            "scheme": "trace",
            "availability": "0-3: 1-9",
            "period": 2,
        },
        "federation.clients_per_round": 2,
        "federation.rounds": 4,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }
    whole = run_experiment(EXPERIMENT, overrides=settings, out=tmp_path / "whole")
    out = tmp_path / "r"
    run_experiment(EXPERIMENT, overrides={**settings, "federation.rounds": 2}, out=out)
    resumed = run_experiment(EXPERIMENT, overrides=settings, out=out, resume=True)
    models = [load_file(one.path / "model.safetensors") for one in (whole, resumed)]
    for name, value in models[0].items():
        np.testing.assert_array_equal(models[1][name], value)
    assert charges(whole.path) == charges(resumed.path)
    checked(resumed.path)


def test_stragglers_take_and_are_charged_fewer_steps(tmp_path: Path) -> None:
    changes = {
        "federation.partial_work": {"share": 0.5},
        "federation.strategy": {"name": "fedprox", "proximal_weight": 0.1},
        "local.steps": 6,
        "federation.rounds": 3,
    }
    result = run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "r")
    checked(result.path)
    charged = charges(result.path)
    for row in result.rounds:
        partial = {one["client"]: one["steps"] for one in row["partial"]}
        assert len(partial) == 3
        assert all(1 <= steps < 6 for steps in partial.values())
        for client in range(6):
            assert (row["round"], partial.get(client, 6)) in charged[client]
    assert result.privacy is not None
    for one in result.privacy.clients:  # the noise is calibrated to the steps of each client
        assert one.steps == sum(steps for _, steps in charged[one.client])
        assert 3.9 < one.epsilon <= 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"federation.partial_work": {"share": 0.5, "on_partial": "drop"}},
        {"federation.partial_work": {"share": 1.0}, "local.epochs": 0.7, "local.steps": None},
        {
            "federation.partial_work": {"share": 0.5},
            "privacy": {
                "unit": "client",
                "max_update_norm": 1.0,
                "target_epsilon": 8.0,
                "delta": 1e-3,
            },
        },
        {
            "federation.partial_work": {"share": 0.5},
            "privacy": {
                "noise_multiplier": 0.6,
                "target_epsilon": 4.0,
                "delta": 1e-3,
                "max_grad_norm": 0.5,
                "on_exhausted": "withdraw",
            },
            "federation.rounds": 12,
        },
        {
            "federation.partial_work": {"share": 0.5},
            "federation.participation": {
                "scheme": "buffered",
                "concurrency": 4,
                "buffer_size": 2,
            },
        },
    ],
)
def test_partial_work_with_other_keys(changes: dict[str, Any], tmp_path: Path) -> None:
    result = run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "r")
    checked(result.path)
    withdraws = changes.get("privacy", {}).get("on_exhausted") == "withdraw"
    assert any(row["withdrawn"] for row in result.rounds) == withdraws
    slow = changes["federation.partial_work"].get("on_partial") == "drop"
    assert any(len(row["participants"]) == 3 for row in result.rounds) or not slow

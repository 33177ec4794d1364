"""A plan says before training what a run says after it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.experiment import load_experiment
from fedsim.planning.projection import Plan, plan_experiment
from fedsim.runs.runner import run_experiment

EXPERIMENT: dict[str, Any] = {
    "name": "plan",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 3, "min_examples": 20},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 4, "clients_per_round": 2},
    "local": {"steps": 2, "batch_size": 200},
    "privacy": {
        "target_epsilon": 2.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "adjacency": "replace_one",  # its samplings are planned the soonest
    },
}
GIVEN = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def planned(**overrides: Any) -> Plan:
    return plan_experiment(load_experiment(EXPERIMENT, overrides))


@pytest.mark.parametrize("privacy", [EXPERIMENT["privacy"], GIVEN])
def test_the_plan_is_what_the_run_spends(tmp_path: Path, privacy: dict[str, Any]) -> None:
    plan = planned(privacy=privacy)
    result = run_experiment(EXPERIMENT, overrides={"privacy": privacy}, out=tmp_path / "r")
    assert result.privacy is not None
    for before, after in zip(plan.clients, result.privacy.clients, strict=True):
        assert (before.examples, before.rounds) == (after.examples, after.rounds)
        assert before.noise_multiplier == after.noise_multiplier
        assert before.epsilon == after.epsilon
    assert plan.system_epsilon == result.privacy.system_epsilon


def test_curves_rise_to_the_end() -> None:
    for client in planned().clients:
        rounds, values = zip(*client.curve, strict=True)
        assert list(rounds) == sorted(set(rounds))
        assert rounds[-1] == client.rounds
        assert list(values) == sorted(values)
        assert 1.95 < values[-1] == client.epsilon <= 2.0


def test_variations_go_the_right_way() -> None:
    everybody = {"federation.clients_per_round": None}
    plan = planned(**everybody)
    noise = {one.change.split(":")[0]: one.noise_multiplier for one in plan.variations}
    assert noise["half the batch"] < noise["as planned"] < noise["double the batch"]
    assert noise["half the rounds"] < noise["as planned"] < noise["double the rounds"]
    assert noise["as planned"] < noise["privacy.sampling=shuffle"]
    given = planned(**everybody, privacy=GIVEN)
    spent = {one.change: one.epsilon for one in given.variations}
    assert spent["half the rounds"] < spent["as planned"] < spent["double the rounds"]


def test_variations_are_of_a_client_that_takes_a_step() -> None:
    plan = planned(**{"federation.rounds": 1, "federation.clients_per_round": 1})
    steps = {client.client: client.steps for client in plan.clients}
    assert min(steps.values()) == 0 < steps[plan.median_client]


SHARED: dict[str, Any] = {
    "privacy": {
        **EXPERIMENT["privacy"],
        "trust": {"name": "distributed"},
        "clients": {"0": {"target_epsilon": 0.5}},
    },
    "secure_aggregation": {"protocol": "additive", "aggregators": 2, "min_clients": 3},
    "local.steps": 1,
    "federation.clients_per_round": None,
}


@pytest.mark.parametrize("settings", [{}, SHARED])
@pytest.mark.parametrize(
    ("change", "override"),
    [
        ("as planned", {}),
        ("half the rounds", {"federation.rounds": 2}),
        ("double the batch: local.batch_size=400", {"local.batch_size": 400}),
    ],
)
def test_a_variation_is_the_plan_of_the_changed_file(
    settings: dict[str, Any], change: str, override: dict[str, Any]
) -> None:
    """Also where the budget of another client decides the noise."""
    plan = planned(**settings)
    (shown,) = (row for row in plan.variations if row.change == change)
    client = planned(**settings, **override).clients[plan.median_client]
    assert (shown.noise_multiplier, shown.steps) == (client.noise_multiplier, client.steps)
    assert shown.epsilon == client.epsilon


def test_nothing_to_plan_without_privacy() -> None:
    with pytest.raises(PrivacyPlanError, match="no privacy section"):
        planned(privacy=None)


def test_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.clients import client_round

    def train(*arguments: object, **options: object) -> None:
        raise AssertionError("a plan must not train")

    monkeypatch.setattr(client_round, "block_of", train)
    planned()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedsim.cli import main

    file = tmp_path / "e.json"
    file.write_text(json.dumps(EXPERIMENT))  # JSON is YAML
    plot = tmp_path / "p.svg"
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", str(file), "--json", "--plot", str(plot)])
    main()
    content = json.loads(capsys.readouterr().out)
    assert content["system_epsilon"] <= 2.0
    assert len(content["clients"]) == 3
    assert plot.read_text().lstrip().startswith("<?xml")
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", str(file)])
    main()
    assert "no training was done" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", str(file), "--plot", "p.jpg"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert ".svg, .png or .pdf file, got 'p.jpg'" in capsys.readouterr().err

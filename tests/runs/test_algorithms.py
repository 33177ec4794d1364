"""Whole runs of algorithms: charges, resume, replay, refusals; strategies of Flower."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.first_checks import AlgorithmError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
OUTPUT = {
    "mechanism": {"name": "output_perturbation", "max_feature_norm": 1.0},
    **{"target_epsilon": 10.0, "delta": 1e-3},
}
FLOWER = "flwr.serverapp.strategy:"


def experiment(strategy: object, **changes: Any) -> dict[str, Any]:
    return {
        "name": "algorithms",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 3, "strategy": strategy},
        "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": PRIVACY,
        **changes,
    }


def model_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    "strategy", ["scaffold", pytest.param(f"{FLOWER}FedAdam", marks=pytest.mark.slow)]
)
def test_a_resumed_run_has_the_same_bits_and_can_be_replayed(
    strategy: str, tmp_path: Path, stop_after: Any
) -> None:
    settings = experiment(strategy)
    whole = run_experiment(settings, out=tmp_path / "whole")
    run_experiment(settings, out=tmp_path / "part", callback=stop_after(2))
    again = run_experiment(settings, out=tmp_path / "part", resume=True)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name
    assert verify_run(RunDirectory(again.path)).problems == ()
    assert replay_run(RunDirectory(again.path)).problems == ()


def test_control_variates_cost_nothing(tmp_path: Path) -> None:
    """The events of DP-SCAFFOLD are those of FedAvg: its upload is the model alone."""
    given = {
        name: {"rounds": 3, "clients_per_round": 3, "strategy": name}
        for name in ("fedavg", "scaffold")
    }
    runs = {
        name: run_experiment(experiment(name, federation=federation), out=tmp_path / name)
        for name, federation in given.items()
    }
    spent = {
        name: [
            {key: one[key] for key in ("epsilon", "epsilon_rdp", "noise_multiplier", "ledger")}
            for one in json.loads((run.path / "privacy.json").read_text())["clients"]
        ]
        for name, run in runs.items()
    }
    assert spent["fedavg"] == spent["scaffold"]
    models = {name: model_of(one.path) for name, one in runs.items()}
    assert any(
        np.abs(models["fedavg"][key] - models["scaffold"][key]).max() > 1e-4
        for key in models["fedavg"]
    )


@pytest.mark.slow
def test_ray_workers_train_the_same(tmp_path: Path, shared_ray: None) -> None:
    """With the strategy that sends them more than the model."""
    here = run_experiment(experiment("scaffold"), out=tmp_path / "here")
    there = run_experiment(
        experiment("scaffold", runtime={"engine": "ray", "workers": 2}), out=tmp_path / "ray"
    )
    for name, value in model_of(here.path).items():
        np.testing.assert_array_equal(value, model_of(there.path)[name])


@pytest.mark.parametrize("theirs", ["FedMedian", "FedTrimmedAvg"])
def test_flowers_own_robust_means_are_the_built_in_ones(theirs: str, tmp_path: Path) -> None:
    ours = {"FedMedian": "fedmedian", "FedTrimmedAvg": "trimmed_mean"}[theirs]
    one = run_experiment(experiment(ours, privacy=None), out=tmp_path / "ours")
    two = run_experiment(experiment(f"{FLOWER}{theirs}", privacy=None), out=tmp_path / "theirs")
    for name, value in model_of(one.path).items():
        np.testing.assert_allclose(value, model_of(two.path)[name], atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (f"{FLOWER}FedProx", "it sends proximal-mu to clients, which fedsim's clients do not"),
        (f"{FLOWER}QFedAvg", "refuses client_learning_rate: Field required"),
        ({"name": f"{FLOWER}FedAdam", "etta": 1}, "refuses etta: .* its settings are eta, eta_l,"),
        (f"{FLOWER}FedXgbBagging", "failed on the initial model with InconsistentMessageReplies"),
    ],
)
def test_a_strategy_of_flower_that_cannot_work_is_refused_in_one_line(
    strategy: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run_experiment(experiment(strategy), out=tmp_path / "run")
    assert "\n" not in str(caught.value)


FORGETFUL = """
from flwr.serverapp.strategy import FedAvg

class Forgetful(FedAvg):
    def __init__(self, kind="list", **options):
        super().__init__(**options)
        self.kind, self.losses, self.controls = kind, [], {}

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.kind == "list":
            self.losses.append(1.5)
        elif self.kind == "number":
            self.controls[1] = next(iter(arrays.values())).numpy()
        else:
            self.name = "new"
        return arrays, metrics
"""


@pytest.mark.parametrize(
    ("kind", "changed"), [("list", "losses"), ("number", "controls"), ("new", "name")]
)
def test_what_a_strategy_of_flower_would_forget_is_refused(
    kind: str, changed: str, tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text(FORGETFUL)
    settings = experiment({"name": "./s.py:Forgetful", "kind": kind})
    with pytest.raises(AlgorithmError, match=f"it changed its attribute '{changed}' to a"):
        run_experiment(settings, out=tmp_path / "run", base=tmp_path)


SECURE = {"secure_aggregation": {"min_clients": 3}}
CENTRAL = {
    "privacy": {
        "target_epsilon": 8.0,
        "delta": 1e-3,
        "trust": "central",
        "unit": "client",
        "max_update_norm": 1.0,
    }
}


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("scaffold", SECURE, "scaffold uses each client's model by itself, and secure_aggregation"),
        ("fednova", SECURE, "fednova weighs clients by the steps that they took, and secure_agg"),
        ("krum", CENTRAL, "krum uses each client's model by itself, and with trust: central"),
        ("qfedavg", {}, "qfedavg needs each client's loss, .* use privacy: null"),
        (
            "scaffold",
            {"local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.1}}},
            "local.optimizer: must be sgd without momentum and weight_decay with strategy scaffold",
        ),
        (
            {"name": "krum", "malicious_clients": 2},
            {},
            "krum needs at least 7 clients in a round with these settings, got 5",
        ),
        ({"name": "fedadam", "lr": 0.1}, {}, "federation.strategy.lr: moved; write federation"),
    ],
)
def test_what_an_algorithm_does_not_go_with_is_found_in_the_file(
    strategy: object, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment(strategy, **changes)))
    with pytest.raises(ExperimentError, match=message):
        load_experiment(tmp_path / "e.yaml")


@pytest.mark.parametrize(
    ("base", "options", "privacy", "message"),
    [
        ("krum.Krum", {"malicious_clients": 2}, None, "needs at least 7 clients in a round"),
        ("fedprox.FedProx", {}, OUTPUT, "own.py:Own changes local steps; use fedavg"),
    ],
)
def test_a_class_of_ones_own_keeps_to_the_same_rules(
    base: str, options: dict[str, Any], privacy: Any, message: str, tmp_path: Path
) -> None:
    module, name = base.split(".")
    source = f"from fedsim.algorithms.built_in.{module} import {name}\n\nclass Own({name}): pass\n"
    (tmp_path / "own.py").write_text(source)
    optimizer = {"name": "sgd", "lr": 0.5, "weight_decay": 0.1}
    local = {"steps": 1, "batch_size": 8, "optimizer": optimizer}
    settings = experiment({"name": "./own.py:Own", **options}, privacy=privacy, local=local)
    settings["model"]["features"] = ["unit_norm"]
    with pytest.raises(AlgorithmError, match=message):
        assemble(load_experiment(settings, base=tmp_path), ledger=None)


def test_server_optimizers_go_with_sums(tmp_path: Path) -> None:
    for changes in (SECURE, CENTRAL):
        load_experiment(experiment({"name": "fedadam", "server_lr": 0.1}, **changes))

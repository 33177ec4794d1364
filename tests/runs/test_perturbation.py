"""Noise on trained models and on examples: runs, their check, replay and resume, and refusals."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

from fedsim.accountant import Gaussian, JointGaussian
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.federation.plan import problem_of
from fedsim.noise import spline
from fedsim.planning.projection import plan_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.private_files import DeploymentError
from fedsim.tools.replay import replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "perturbed",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 6, "alpha": 0.5, "min_examples": 5},
    },
    "model": {"name": "logistic", "features": ["unit_norm"]},
    "federation": {"rounds": 3, "clients_per_round": 4},
    "local": {
        "steps": 10,
        "batch_size": 16,
        "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.1},
    },
    "privacy": {
        "mechanism": {"name": "output_perturbation", "max_feature_norm": 1.0},
        "target_epsilon": 10.0,
        "delta": 1e-3,
    },
}
KINDS = ("output", "input")
TITLES = {"output": "trained model", "input": "examples"}


def changed(kind: str, **changes: Any) -> LoadedExperiment:
    """Return the experiment with the mechanism of a kind."""
    return load_experiment(
        EXPERIMENT, {"privacy.mechanism.name": f"{kind}_perturbation", **changes}
    )


def run(path: Path, kind: str, overrides: dict[str, Any] | None = None, **options: Any) -> Path:
    changes = {"privacy.mechanism.name": f"{kind}_perturbation", **(overrides or {})}
    return run_experiment(EXPERIMENT, overrides=changes, out=path, **options).path


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One run of each kind."""
    base = tmp_path_factory.mktemp("perturbed")
    return cache(lambda kind: run(base / kind, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_charged_as_it_releases(whole_of: Callable[[str], Path], kind: str) -> None:
    path = whole_of(kind)
    privacy = json.loads((path / "privacy.json").read_text())
    assert privacy["mechanism"] == {
        "name": f"{kind}_perturbation",
        "max_feature_norm": 1.0,
        "max_target_norm": None,
    }
    assert privacy["sampling"] is None
    assert 9.99 < privacy["system_epsilon"] <= 10.0
    points = {point["title"] for point in privacy["statement_points"]}
    assert {"output": "Noise on the trained model", "input": "Noise on the examples"}[
        kind
    ] in points
    assert "DP-SGD in every client" not in points
    journal = FileJournal(path / "ledger.jsonl")
    for client, row in enumerate(privacy["clients"]):
        history = journal.history(client)
        entries = [list(charge.ledger.entries) for charge in history]
        if kind == "output":
            ((event, _),) = entries[0]
            assert isinstance(event, Gaussian)
            assert entries == [[(event, 1)]] * len(history)
            noise = event.noise_multiplier
        else:
            ((event, _),) = entries[0]
            assert isinstance(event, JointGaussian)
            assert entries == [[(event, 1)]] + [[]] * (len(history) - 1)
            noise = group_noise_multiplier(event.noise_multipliers)
        assert noise <= row["noise_multiplier"] < noise * 1.001
    assert verify_run(RunDirectory.open(path)).problems == ()
    assert replay_run(RunDirectory.open(path)).problems == ()


def test_rounds_cost_nothing_after_noisy_examples() -> None:
    few, many = (
        plan_experiment(
            load_experiment(
                EXPERIMENT,
                overrides={
                    "privacy.mechanism.name": "input_perturbation",
                    "federation.rounds": rounds,
                },
            ),
            curves=False,
        )
        for rounds in (3, 300)
    )
    assert few.system_epsilon == many.system_epsilon
    assert few.clients[0].noise_multiplier == many.clients[0].noise_multiplier
    assert len(many.cells) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, kind: str) -> None:
    noise = {"privacy.noise_multiplier": 2.0, "privacy.target_epsilon": None}
    whole = run(tmp_path / "whole", kind, noise)
    run(tmp_path / "part", kind, {**noise, "federation.rounds": 1})
    part = run(tmp_path / "part", kind, noise, resume=True)
    models = [load_file(path / "model.safetensors") for path in (whole, part)]
    for name, value in models[0].items():
        np.testing.assert_array_equal(models[1][name], value)
    assert verify_run(RunDirectory.open(part)).problems == ()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("output", {"secure_aggregation": {"protocol": "additive", "aggregators": 2}}),
        ("input", {"privacy.adjacency": "replace_one"}),
        ("input", {"runtime": {"engine": "ray", "workers": 2}}),
        ("output", {"local.batch_size": "full"}),
        *((kind, {"local.vectorized_clients": "off"}) for kind in KINDS),
    ],
)
def test_it_works_with_the_rest(
    whole_of: Callable[[str], Path], tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    path = run(tmp_path / "r", kind, changes)
    assert verify_run(RunDirectory.open(path)).problems == ()
    if "runtime" in changes or "local.vectorized_clients" in changes:
        other = load_file(whole_of(kind) / "model.safetensors")
        for name, value in load_file(path / "model.safetensors").items():
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "path", "message"),
    [
        ("output", {"privacy.trust": "central"}, "privacy.trust", "central trust needs noise"),
        ("output", {"privacy.unit": "client"}, "privacy.unit", "sensitivity for one example"),
        (
            "input",
            {"privacy.adjacency": {"name": "add_remove", "declared_examples": 9}},
            "privacy.adjacency",
            "one noisy row for each example",
        ),
        ("output", {"model.name": "mlp"}, "model.name", "the loss is not convex"),
        ("output", {"local.optimizer.weight_decay": 0}, "local.optimizer", "strongly convex"),
        ("output", {"local.optimizer.momentum": 0.5}, "local.optimizer", "plain gradient descent"),
        ("output", {"federation.strategy": "fedprox"}, "federation.strategy", "changes local"),
        (
            "output",
            {"local.augmentation_multiplicity": 2},
            "local.augmentations",
            "remove the views",
        ),
        ("input", {"privacy.noise": "secure"}, "privacy.noise", "another release"),
        ("input", {"privacy.clipping": "automatic"}, "privacy.clipping", "acts on gradients"),
        (
            "output",
            {"privacy.clipping.groups": {"*.weight": {"max_grad_norm": 1.0}}},
            "privacy",
            "groups bounds nothing",
        ),
        ("input", {"privacy.sampling.rate": 0.5}, "privacy.sampling.rate", "acts on gradients"),
        ("input", {"model.loss": "mse"}, "privacy.mechanism", "needs max_target_norm"),
        (
            "input",
            {"privacy.mechanism.max_target_norm": 1.0},
            "privacy.mechanism.max_target_norm",
            "have a bound",
        ),
        (
            "output",
            {"local.lr_schedule": {"name": "cosine", "T_max": 3}},
            "local.lr_schedule",
            "one learning",
        ),
        ("output", {"privacy.max_grad_norm": 1.0}, "privacy", "bounds nothing"),
        (
            "output",
            {"privacy.mechanism": {"name": "output_perturbation"}},
            "privacy.mechanism.max_feature_norm",
            "missing",
        ),
    ],
)
def test_what_has_no_proof_is_refused(
    kind: str, changes: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        changed(kind, **changes)
    found = {".".join(map(str, one.path)): one.message for one in caught.value.problems}
    assert message in found[path]


def test_a_rate_without_proof_and_another_model_are_refused_before_training() -> None:
    with pytest.raises(PrivacyPlanError, match="it may be at most"):
        assemble(load_experiment(EXPERIMENT, overrides={"local.optimizer.lr": 10.0}), ledger=None)
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    deep = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    frozen = nn.Linear(64, 10)
    frozen.bias.requires_grad_(False)
    for model in (deep, frozen):
        with pytest.raises(PrivacyPlanError, match="one linear layer"):
            problem_of(federation.experiment, model, federation.data)


def test_audit_and_deployment_refuse_it_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrivacyPlanError, match="noise on trained models"):
        audit_experiment(load_experiment(EXPERIMENT))
    loaded = changed("input")
    with pytest.raises(DeploymentError, match="noisy examples are charged once"):
        write_app(loaded, tmp_path / "app")


@pytest.mark.usefixtures("whole_probe")
@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_finds_less_noise_than_charged(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = changed(kind)
    federation = assemble(loaded, ledger=None)
    probe_mechanisms(federation)
    whole = spline.fill_rows
    monkeypatch.setattr(
        spline, "fill_rows", lambda own, rows: (whole(own, rows), np.rint(rows / 2, out=rows))
    )
    with pytest.raises(MechanismMismatchError, match="noise multiplier is"):
        probe_mechanisms(federation)

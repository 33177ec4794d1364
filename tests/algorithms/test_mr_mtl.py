"""Models of each client's own: MR-MTL and local training against numpy, their scores and resume."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim.experiment.errors import ExperimentError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

PLUGIN = """
import numpy as np
from torch import nn


def data(seed=0):
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(4), [6, 9, 12, 15])
    x = rng.normal(size=(42, 3)).astype(np.float32) + users[:, None].astype(np.float32) / 2
    y = (x @ [1.0, -1.0, 0.5] + rng.normal(size=42)).astype(np.float32)
    return x, y, x[:8], y[:8]


def user(features, targets, seed, num_clients=4):
    return np.repeat(np.arange(4), [6, 9, 12, 15])


def net():
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    nn.init.zeros_(model[0].weight)
    return nn.Sequential(ToDouble(), model)


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()
"""
ROUNDS, STEPS, LR, CLIP = 3, 4, 0.05, 0.5
NAME = "1.0.weight"


def arrays() -> tuple[np.ndarray, ...]:
    scope: dict[str, Any] = {}
    exec(PLUGIN, scope)  # the same arrays
    return (*(np.asarray(each, float) for each in scope["data"]()), scope["user"](0, 0, 0))


def personal(weight: float, *, clip: float | None = None, drawn: list[list[int]]) -> np.ndarray:
    """Return the clients' models (4, 3) and their mean (3,), stacked."""
    x, y, *_, users = arrays()
    own, center, uploaded = np.zeros((4, 3)), np.zeros(3), np.zeros(4, bool)
    for clients in drawn:
        for k in clients:
            rows, target = x[users == k], y[users == k]
            for _ in range(STEPS):
                each = 2 * (rows @ own[k] - target)[:, None] * rows
                if clip is not None:
                    norms = np.linalg.norm(each, axis=1, keepdims=True)
                    each = each * np.minimum(1.0, clip / norms)
                own[k] = own[k] - LR * (each.mean(0) + weight * (own[k] - center))
            uploaded[k] = True
        center = own[uploaded].mean(0)
    return np.vstack([own, center])


def run(tmp_path: Path, strategy: object, out: str = "run", **changes: Any) -> fedsim.RunResult:
    (tmp_path / "p.py").write_text(PLUGIN)
    experiment = {
        "name": "personal",
        "data": {"dataset": "./p.py:data", "partition": {"scheme": "./p.py:user"}},
        "model": {"name": "./p.py:net", "loss": "mse"},
        "federation": {"rounds": ROUNDS, "strategy": strategy},
        "local": {"steps": STEPS, "batch_size": "full", "optimizer": {"name": "sgd", "lr": LR}},
        "privacy": None,
    }
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    resume = bool(overrides.pop("resume", False))
    return run_experiment(
        experiment, overrides=overrides, base=tmp_path, out=tmp_path / out, resume=resume
    )


def final(result: fedsim.RunResult) -> np.ndarray:
    return load_file(result.path / "model.safetensors")[NAME][0]


PRIVATE = {"noise_multiplier": 0.0, "delta": 1e-3, "max_grad_norm": CLIP}
ALL = [[0, 1, 2, 3]] * ROUNDS


@pytest.mark.parametrize(
    ("strategy", "weight", "privacy"),
    [
        ("local_only", 0.0, None),
        ({"name": "mr_mtl", "mean_weight": 0.8}, 0.8, PRIVATE),
        pytest.param("mr_mtl", 1.0, None, marks=pytest.mark.slow),
    ],
)
def test_models_and_scores_are_those_of_the_formula(
    strategy: object, weight: float, privacy: Any, tmp_path: Path
) -> None:
    result = run(tmp_path, strategy, privacy=privacy)
    *own, center = personal(weight, clip=None if privacy is None else CLIP, drawn=ALL)
    np.testing.assert_allclose(final(result), center, atol=1e-6)
    _, _, x, y, _ = arrays()
    scores = [np.mean((x @ w - y) ** 2) for w in own]
    assert result.metrics["test_mse"] == pytest.approx(np.mean(scores), rel=1e-6)
    assert result.metrics["test_mse"] != pytest.approx(np.mean((x @ center - y) ** 2), rel=1e-5)
    assert verify_run(RunDirectory.open(result.path)).problems == ()


@pytest.mark.slow
def test_a_client_that_was_not_drawn_pulls_nobody(tmp_path: Path) -> None:
    result = run(tmp_path, "mr_mtl", federation__clients_per_round=2)
    releases = (result.path / "releases.jsonl").read_text().splitlines()
    drawn = [[int(one) for one in json.loads(line)["uploads"]] for line in releases]
    assert [len(clients) for clients in drawn] == [2, 2, 2]
    np.testing.assert_allclose(final(result), personal(1.0, drawn=drawn)[-1], atol=1e-6)


@pytest.mark.slow
def test_a_resumed_private_run_is_the_same_run(tmp_path: Path) -> None:
    privacy = {**PRIVATE, "noise_multiplier": 1.0}
    whole = run(tmp_path, "mr_mtl", "whole", privacy=privacy)
    run(tmp_path, "mr_mtl", "part", privacy=privacy, federation__rounds=1)
    part = run(tmp_path, "mr_mtl", "part", privacy=privacy, resume=True)
    np.testing.assert_array_equal(final(whole), final(part))
    assert replay_run(RunDirectory.open(part.path), base=tmp_path).problems == ()


@pytest.mark.parametrize(
    "change",
    [
        {"secure_aggregation": {"protocol": "additive"}},
        {"federation.ema_decay": 0.5},
        {"privacy": {**PRIVATE, "trust": "central"}, "local.steps": 1},
    ],
)
def test_what_hides_single_models_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="mr_mtl"):
        run(tmp_path, "mr_mtl", **change)

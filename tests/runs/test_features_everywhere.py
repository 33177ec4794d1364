"""Transforms, public initial weights and frozen parts on every engine, and in every later check."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from fedsim.core.errors import InputError
from fedsim.experiment import load_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.replay import ReplayImpossibleError, replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "features",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {
        "name": "mlp",
        "args": {"hidden": [8]},
        "features": ["hog", "unit_norm", {"random_fourier": {"dim": 20, "gamma": 2}}],
        "init": "public.safetensors",
        "freeze": ["1.*"],
    },
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 40, "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with public weights of the first layer."""
    weights = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
    save_file({"1.weight": weights}, tmp_path / "public.safetensors")
    return tmp_path


def run(base: Path, name: str, **overrides: Any) -> Path:
    return run_experiment(EXPERIMENT, overrides=overrides, out=base / name, base=base).path


@pytest.mark.parametrize("private", [True, False], ids=["private", "plain"])
def test_frozen_values_are_the_public_ones_after_training(base: Path, private: bool) -> None:
    path = run(base, "r", **({} if private else {"privacy": None}))
    values, public = load_file(path / "model.safetensors"), load_file(base / "public.safetensors")
    assert values["1.weight"].tobytes() == public["1.weight"].tobytes()
    assert np.abs(values["3.weight"]).max() > 0


@pytest.mark.slow
def test_a_run_resumes_from_the_same_public_weights_only(base: Path, stop_after) -> None:
    whole = run(base, "whole")
    options: dict[str, Any] = {"out": base / "part", "base": base}
    run_experiment(EXPERIMENT, callback=stop_after(1), **options)
    before = (base / "public.safetensors").read_bytes()
    save_file({"1.weight": torch.zeros(8, 20)}, base / "public.safetensors")
    with pytest.raises(InputError, match="the initial model changed"):
        run_experiment(EXPERIMENT, resume=True, **options)
    (base / "public.safetensors").write_bytes(before)
    run_experiment(EXPERIMENT, resume=True, **options)
    for name in ("model.safetensors", "privacy.json"):
        assert (base / "part" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_a_run_is_verified_and_computed_again(base: Path) -> None:
    directory = RunDirectory.open(run(base, "r"))
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=base).problems == ()


@pytest.mark.slow
def test_a_replay_refuses_other_features(base: Path) -> None:
    path = run(base, "r")
    file = path / "experiment.yaml"
    file.write_text(file.read_text().replace("gamma: 2", "gamma: 1"))
    with pytest.raises(ReplayImpossibleError, match="the data"):
        replay_run(RunDirectory.open(path), base=base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol", [{"protocol": "additive", "aggregators": 2}, {"protocol": "secagg"}]
)
def test_secure_sums_keep_frozen_values(base: Path, protocol: dict[str, Any]) -> None:
    path = run(base, "r", secure_aggregation=protocol)
    values, public = load_file(path / "model.safetensors"), load_file(base / "public.safetensors")
    assert values["1.weight"].tobytes() == public["1.weight"].tobytes()


@pytest.mark.slow
def test_an_audit_sees_the_features(base: Path) -> None:
    found = audit_experiment(load_experiment(EXPERIMENT, base=base), clients=1, steps=200)
    assert len(found.clients) == 1
    assert not found.clients[0].violations


def test_the_statement_names_public_features_weights_and_frozen_parts(base: Path) -> None:
    path = run(base, "r")
    content = json.loads((path / "privacy.json").read_text())
    assert content["public_parts"] == {
        "features": ["hog", "unit_norm", "random_fourier"],
        "init": "public.safetensors",
        "freeze": ["1.*"],
    }
    (point,) = [one for one in content["statement_points"] if one["id"] == "public_parts"]
    assert "fixed and public, and each uses one example at a time" in point["text"]
    assert "is tuning" in point["text"]
    assert "the file public.safetensors" in point["text"]
    assert "1.* are not trained" in point["text"]
    content["public_parts"]["features"] = ["unit_norm"]
    (path / "privacy.json").write_text(json.dumps(content))
    problems = verify_run(RunDirectory.open(path)).problems
    assert any(str(one).startswith("public_parts is ") for one in problems)

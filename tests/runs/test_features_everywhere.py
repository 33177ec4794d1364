"""Transforms, public initial weights and frozen parts on every engine, and in every later check."""

import json
import shutil
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


def home(path: Path) -> Path:
    """Return a directory with public weights of the first layer."""
    weights = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
    save_file({"1.weight": weights}, path / "public.safetensors")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return home(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run, beside its public weights; no test changes it."""
    return run(home(tmp_path_factory.mktemp("features")), "r")


def run(base: Path, name: str, **overrides: Any) -> Path:
    return run_experiment(EXPERIMENT, overrides=overrides, out=base / name, base=base).path


def assert_frozen(path: Path) -> None:
    values = load_file(path / "model.safetensors")
    public = load_file(path.parent / "public.safetensors")
    assert values["1.weight"].tobytes() == public["1.weight"].tobytes()
    assert np.abs(values["3.weight"]).max() > 0


def test_frozen_values_are_the_public_ones_after_training(whole: Path, base: Path) -> None:
    assert_frozen(whole)
    assert_frozen(run(base, "r", privacy=None))


@pytest.mark.slow
def test_a_run_resumes_from_the_same_public_weights_only(
    whole: Path, base: Path, stop_after
) -> None:
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


def test_a_run_is_verified_and_computed_again_from_the_same_features(
    whole: Path, tmp_path: Path
) -> None:
    directory = RunDirectory.open(whole)
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=whole.parent).problems == ()
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    file = copy / "experiment.yaml"
    file.write_text(file.read_text().replace("gamma: 2", "gamma: 1"))
    with pytest.raises(ReplayImpossibleError, match="the data"):
        replay_run(RunDirectory.open(copy), base=whole.parent)


@pytest.mark.slow
def test_secure_sums_keep_frozen_values(base: Path) -> None:
    assert_frozen(run(base, "r", secure_aggregation={"protocol": "additive", "aggregators": 2}))


@pytest.mark.slow
def test_an_audit_sees_the_features(base: Path) -> None:
    found = audit_experiment(load_experiment(EXPERIMENT, base=base), clients=1, steps=200)
    assert len(found.clients) == 1
    assert not found.clients[0].violations


def test_the_statement_names_public_features_weights_and_frozen_parts(
    whole: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "r"))
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

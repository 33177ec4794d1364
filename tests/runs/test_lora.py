"""Federations that train low-rank adapters on a frozen backbone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fedsim
from fedsim.experiment.errors import ExperimentError
from fedsim.models.catalog import ModelError
from fedsim.models.local_base import BASE_DIGEST
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

TRAINED = {"1.down.weight", "1.up.weight", "3.weight", "3.bias"}
EXPERIMENT = {
    "name": "adapters",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {
        "name": "mlp",
        "args": {"hidden": [8]},
        "init": "w.safetensors",
        "lora": {"rank": 2, "targets": ["1"]},
        "train": ["3.*"],
    },
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def write_backbone(base: Path, seed: int = 0) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) / 8
    save_file({"1.weight": weight}, base / "w.safetensors")


def run(base: Path, *changes: str, out: str = "run", **options):
    return run_experiment(EXPERIMENT, overrides=changes, out=base / out, base=base, **options)


def names(path: Path) -> set[str]:
    with safe_open(path, "np") as file:
        return set(file.keys())


def test_adapters_alone_travel_and_the_saved_model_is_whole(tmp_path: Path) -> None:
    write_backbone(tmp_path)
    result = run(tmp_path)
    directory = RunDirectory(result.path)
    assert names(result.path / "checkpoint" / "model.safetensors") == {*TRAINED, BASE_DIGEST}
    assert names(result.path / "model.safetensors") == {
        "1.weight", "1.bias", "3.weight", "3.bias",
    }  # fmt: skip
    up = result.rounds[0]["traffic"]["up"]
    values = 2 * 64 + 8 * 2 + 8 * 10 + 10
    assert 4 * (4 * values + 32) == up  # four clients, the digest of the base beside float32
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=tmp_path).problems == ()
    model = result.model()
    assert [name for name, _ in model.named_children()] == ["0", "1", "2", "3"]
    run(tmp_path, "model.lora.save=adapters", out="small")
    small = tmp_path / "small"
    assert names(small / "model.safetensors") == {*TRAINED, BASE_DIGEST}
    assert verify_run(RunDirectory(small)).problems == ()
    x = torch.randn(5, 64)
    assert torch.equal(fedsim.load_model(small, base=tmp_path)(x), model(x))
    found = fedsim.predict(small, np.zeros((2, 1, 8, 8), np.float32), base=tmp_path)
    assert len(found) == 2
    write_backbone(tmp_path, seed=1)
    with pytest.raises(ModelError, match=r"another backbone than model\.init"):
        fedsim.load_model(small, base=tmp_path)
    with pytest.raises(RunDirectoryError, match="the initial model changed"):
        run(tmp_path, "federation.rounds=3", resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        ["secure_aggregation={protocol: additive, min_clients: 3}", "privacy.trust=distributed"],
        ["privacy.unit=client", "privacy.max_grad_norm=null", "privacy.max_update_norm=1.0"],
    ],
)
@pytest.mark.slow
def test_adapters_go_with_sums_and_units(tmp_path: Path, changes: list[str]) -> None:
    write_backbone(tmp_path)
    result = run(tmp_path, *changes)
    directory = RunDirectory(result.path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=tmp_path).problems == ()
    again = run(tmp_path, *changes, "federation.rounds=3", resume=True)
    assert again.status == "completed"
    assert len(again.rounds) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.freeze=['1.*']", "all other parameters are frozen; remove freeze"),
        ("model.init=null", "add init: weights.safetensors"),
        ("model.lora.rank=0", "greater than or equal to 1|at least 1|>= 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, change, message) -> None:
    write_backbone(tmp_path)
    with pytest.raises(ExperimentError, match=message):
        run(tmp_path, change)

"""A built-in dataset in a folder of the user goes through run, replay, footprint and deployment."""

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fedsim.experiment import load_experiment, read_settings
from fedsim.federation.federation import digest_conditions
from fedsim.planning.validation import find_footprint
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.replay import ReplayImpossibleError, replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "folder",
    "data": {
        "dataset": "mnist",
        "args": {"path": "files"},
        "partition": {"scheme": "iid", "num_clients": 2},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a directory with an experiment and 40 + 10 images of MNIST's format."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "home" / "files"
    folder.mkdir(parents=True)
    for part, number in (("train", 40), ("t10k", 10)):
        images = rng.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = (np.arange(number) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    (folder.parent / "exp.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return folder.parent


def test_a_run_is_replayed_from_its_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_experiment(home / "exp.yaml", out=tmp_path / "run")
    replay = replay_run(RunDirectory(tmp_path / "run"), base=home)
    assert (replay.rounds, replay.problems) == (2, ())
    with pytest.raises(ReplayImpossibleError, match=r"no such folder: .*--base names"):
        replay_run(RunDirectory(tmp_path / "run"))
    recorded = read_settings(tmp_path / "run" / "experiment.yaml")
    assert recorded.data.args == {"path": "files"}


def test_the_place_of_the_folder_is_no_condition_of_training(home: Path) -> None:
    shutil.copytree(home / "files", home / "other")
    digests = {
        digest_conditions(
            load_experiment(home / "exp.yaml", {"data.args.path": path}).experiment,
            "sources",
            torch.device("cpu"),
        )
        for path in ("files", "other", str(home / "files"))
    }
    assert len(digests) == 1


def test_the_folder_is_in_the_footprint_and_stays_on_the_nodes(home: Path, tmp_path: Path) -> None:
    loaded = load_experiment(home / "exp.yaml")
    assert find_footprint(loaded).files == (home / "files",)
    app = write_app(loaded, tmp_path / "app")
    assert app.node_files == (home / "files",)
    placed = load_experiment(tmp_path / "app" / "fedsim_app" / "experiment.yaml").experiment
    assert placed.data.args == {"path": str(home / "files")}


def test_a_name_on_the_hub_is_in_the_footprint(home: Path) -> None:
    hub = {"data.dataset": "huggingface", "data.args": {"name": "owner/set"}}
    footprint = find_footprint(load_experiment(home / "exp.yaml", hub))
    assert (footprint.hub, footprint.files) == (("owner/set",), ())
    assert footprint.lines() == ["  may fetch from the hub of Hugging Face: owner/set"]

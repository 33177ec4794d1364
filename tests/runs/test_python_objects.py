"""A notebook's arrays, model and loss run as files do, and only their names are written down."""

import copy
import json
import pickle
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_iris

import fedsim
from fedsim.core.plugin_sources import read_sources
from fedsim.core.python_objects import PythonObject
from fedsim.experiment import load_experiment
from fedsim.models.catalog import ModelError
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.inputs import objects_digest
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

_iris: Any = load_iris(return_X_y=True)
X, Y = _iris
CODE = """
from torch import nn

WIDTH = 8

def head(width):
    return nn.Linear(width, 3)

class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), head(width))

    def forward(self, x):
        return self.layers(x)

def load(seed, shift):
    return x + shift, y

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


def notebook(code: str = CODE, **names: Any) -> dict[str, Any]:
    """Run cells as a notebook does: their functions are of `__main__`, and in no file."""
    space: dict[str, Any] = {"__name__": "__main__", "x": X, "y": Y, **names}
    exec(compile(textwrap.dedent(code), "<cell>", "exec"), space)
    return space


def experiment(model: object, dataset: object = (X, Y)) -> dict[str, Any]:
    return {
        "name": "cells",
        "data": {"dataset": dataset, "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": model},
        "federation": {"rounds": 2},
        "local": {"steps": 2, "batch_size": 16},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }


def model_of(run: Path) -> dict[str, Any]:
    return {name: value.tobytes() for name, value in load_file(run / "model.safetensors").items()}


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    return notebook()


@pytest.fixture(scope="module")
def done(cell: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    """A finished run of that cell, which no test changes."""
    return fedsim.run(experiment(cell["Net"]), out=tmp_path_factory.mktemp("cells") / "r")


def test_objects_train_the_model_that_files_train(done: fedsim.RunResult, tmp_path: Path) -> None:
    np.savez(tmp_path / "iris.npz", x=X, y=Y)
    (tmp_path / "net.py").write_text(CODE)
    files = experiment("./net.py:Net", {"path": "iris.npz", "target": "y"})
    fedsim.run(files, base=tmp_path, out=tmp_path / "files")
    assert model_of(done.path) == model_of(tmp_path / "files")
    spent = [
        json.loads((run / "privacy.json").read_text()) for run in (done.path, tmp_path / "files")
    ]
    assert spent[0]["system_epsilon"] == spent[1]["system_epsilon"]


@pytest.mark.parametrize("pair", ["tensors", "frames", "four", "function"])
def test_a_dataset_may_be_tensors_frames_a_test_set_of_its_own_or_a_function(
    pair: str, cell: dict[str, Any], tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    dataset = {
        "tensors": (torch.tensor(X), torch.tensor(Y)),
        "frames": (pandas.DataFrame(X), pandas.Series(Y)),
        "four": (X[:100], Y[:100], X[100:], Y[100:]),
        "function": cell["load"],
    }[pair]
    changes: dict[str, Any] = {"model.loss": cell["loss"], "privacy": None}
    if pair == "function":
        changes["data.args"] = {"shift": 0.5}
    result = run_experiment(experiment(cell["Net"], dataset), overrides=changes, out=tmp_path / "r")
    assert result.status == "completed"


def test_a_run_directory_has_names_is_sound_and_gives_the_model_back(
    cell: dict[str, Any], done: fedsim.RunResult, tmp_path: Path
) -> None:
    text = (done.path / "experiment.yaml").read_text()
    assert "dataset: python:arrays" in text
    assert "name: python:Net" in text
    assert not verify_run(RunDirectory.open(done.path)).problems
    inputs = torch.tensor(X[:5], dtype=torch.float32)
    outputs = done.model()(inputs)
    again = fedsim.load_model(done.path, build=cell["Net"])
    assert torch.equal(outputs, again(inputs))
    assert len(fedsim.predict(done.path, X[:5], build=cell["Net"])) == 5
    elsewhere = pickle.loads(pickle.dumps(done))  # another process has the name alone
    for load in (elsewhere.model, lambda: fedsim.load_model(done.path)):
        with pytest.raises(ModelError, match=r"give it again, load_model\(run, build=Net\)"):
            load()
    with pytest.raises(
        ModelError, match=r"build is head, and the run has model\.name 'python:Net'"
    ):
        fedsim.load_model(done.path, build=cell["head"])
    fix = r"write it into a file and name it \./file\.py:Net"
    with pytest.raises(fedsim.FedsimError, match=fix):
        fedsim.run(
            done.path / "experiment.yaml",
            overrides={"data.dataset": (X, Y)},
            out=tmp_path / "other",
        )


def test_a_run_resumes_with_the_same_objects_to_the_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    source = experiment(notebook()["Net"])
    run_experiment(source, overrides={"federation.rounds": 3}, out=whole)
    run_experiment(source, out=parts)
    moved = experiment(notebook("\n# a comment\n\n" + CODE)["Net"])  # a new process, other lines
    run_experiment(moved, overrides={"federation.rounds": 3}, out=parts, resume=True)
    assert model_of(whole) == model_of(parts)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("nn.Tanh()", "nn.ReLU()", "the Python object python:Net changed"),
        (
            "nn.Linear(width, 3)",
            "nn.Linear(width, 3, True)",
            "the Python object python:Net changed",
        ),
        ("WIDTH = 8", "WIDTH = 9", "changed since the run began"),
    ],
)
def test_a_run_with_other_code_does_not_resume(
    old: str, new: str, named: str, done: fedsim.RunResult
) -> None:
    changed = experiment(notebook(CODE.replace(old, new))["Net"])
    with pytest.raises(RunDirectoryError, match=named):
        fedsim.run(changed, out=done.path, resume=True)


def test_a_run_with_other_arrays_does_not_resume(
    cell: dict[str, Any], done: fedsim.RunResult
) -> None:
    other = X.copy()
    other[0, 0] += 0.1
    with pytest.raises(RunDirectoryError, match="the data, or how they are divided"):
        fedsim.run(experiment(cell["Net"], (other, Y)), out=done.path, resume=True)


CAPTURED = """
def make(slope):
    def build():
        return nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(slope))
    return build

from torch import nn
"""


def test_a_value_that_may_be_private_is_in_no_digest_that_can_be_tested() -> None:
    """A mean of the examples, say: whoever knows all examples but one could test guesses."""
    builds = [notebook(CAPTURED)["make"](slope) for slope in (0.1, 0.2)]
    loaded = [load_experiment(experiment(build)) for build in builds]
    plain = [read_sources(one.experiment.plugins, base=one.base).entries for one in loaded]
    keyed = [objects_digest(one.experiment)["objects"] for one in loaded]
    assert plain[0] == plain[1]
    assert keyed[0] != keyed[1]


def test_only_the_name_leaves_the_process() -> None:
    reference = PythonObject("arrays", (X, Y))
    assert copy.deepcopy(reference) is reference
    for text in (pickle.loads(pickle.dumps(reference)), json.loads(json.dumps(reference))):
        assert type(text) is str
        assert text == "python:arrays"


def test_objects_that_cannot_run_are_refused_with_the_way_out(
    cell: dict[str, Any], tmp_path: Path
) -> None:
    net = cell["Net"]
    cases: dict[str, dict[str, Any]] = {
        "engine ray runs clients in other processes": {
            "runtime": {"engine": "ray", "workers": 2},
        },
        "model.name: a Net is no class or function; give one, uncalled": {"model.name": net()},
        "data.dataset: a ndarray is no dataset; give arrays (x, y) or": {"data.dataset": X},
        "data.dataset: a tuple of 3 is no dataset": {"data.dataset": (X, X, Y)},
        "only data.dataset, model.name and model.loss take Python objects": {
            "federation.strategy": net
        },
        "data.args are for dataset functions": {"data.args": {"shift": 1}},
    }
    for message, changes in cases.items():
        with pytest.raises(fedsim.FedsimError) as caught:
            fedsim.run(experiment(net), overrides=changes, out=tmp_path / "r")
        assert message in str(caught.value)
    assert not (tmp_path / "r").exists()

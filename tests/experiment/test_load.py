import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedsim.clients.local_settings import SgdSettings
from fedsim.data.settings import FileDataset
from fedsim.experiment import ExperimentError, Problem, load_experiment


def test_a_good_file(write, good: str) -> None:
    loaded = load_experiment(write(good))
    assert loaded.path == Path("exp.yaml")
    assert loaded.base == Path.cwd()
    experiment = loaded.experiment
    assert experiment.name == "demo"
    assert experiment.seed == 7
    assert experiment.data.partition.num_clients == 10
    assert experiment.local.optimizer == SgdSettings(name="sgd", lr=1.0)
    assert experiment.privacy is not None
    assert experiment.privacy.delta == 1e-3
    with pytest.raises(FrozenInstanceError):
        loaded.path = None  # type: ignore[misc]


def test_the_sections_with_defaults_may_be_left_out(write, good: str) -> None:
    needed = good[: good.index("privacy:")].replace("seed: 7\n", "") + "privacy: null\n"
    experiment = load_experiment(write(needed))
    assert experiment.experiment.seed == 0
    assert experiment.experiment.privacy is None
    assert experiment.experiment.runtime.engine == "local"


def test_the_arguments_of_a_built_in_model_are_written_out(write, good: str) -> None:
    experiment = load_experiment(write(good)).experiment
    assert experiment.model.args == {"hidden": [32], "activation": "relu"}


def test_a_mapping_is_read_like_a_file(write, good: str, tmp_path: Path) -> None:
    from_file = load_experiment(write(good))
    from_mapping = load_experiment({**yaml.safe_load(good), "seed": np.int64(7)})
    assert from_mapping.experiment == from_file.experiment
    assert from_mapping.path is None
    assert from_mapping.base == tmp_path


def test_mistakes_in_a_mapping_have_a_path_but_no_position(good: str) -> None:
    mapping = yaml.safe_load(good)
    mapping["federation"]["rounds"] = "ten"
    mapping["federation"][3] = 4
    mapping["model"]["args"]["hidden"] = [np.float32(1.5)]
    with pytest.raises(ExperimentError) as caught:
        load_experiment(mapping)
    assert str(caught.value).splitlines() == [
        "federation: a key must be a string, got 3",
        "federation.rounds: must be a whole number, got 'ten'",
        "model.args.hidden.0: must be a whole number, got 1.5",
    ]


def test_a_mapping_that_contains_itself(good: str) -> None:
    mapping = yaml.safe_load(good)
    mapping["model"]["args"]["self"] = mapping["model"]["args"]
    with pytest.raises(ExperimentError, match="nested too deeply"):
        load_experiment(mapping)


def test_numbers_too_large_for_a_setting(good: str) -> None:
    mapping = yaml.safe_load(good)
    mapping["seed"] = 10**5000
    mapping["local"]["optimizer"]["lr"] = 10**500
    with pytest.raises(ExperimentError) as caught:
        load_experiment(mapping)
    assert str(caught.value).splitlines() == [
        "seed: number with too many digits",
        "local.optimizer.lr: must be a number, got a huge number",
    ]


def test_relative_files_start_at_the_file_or_at_the_given_base(write, good: str) -> None:
    Path("sub").mkdir()
    Path("sub/d.csv").write_text("y\n")
    Path("sub/m.py").write_text("raise RuntimeError('nobody imports this')")
    text = good.replace("digits", "{path: d.csv, target: y}").replace("mlp", "./m.py:build")
    Path("sub/exp.yaml").write_text(text)
    loaded = load_experiment("sub/exp.yaml")
    assert loaded.base == Path.cwd() / "sub"
    assert loaded.experiment.data.dataset == FileDataset(path="d.csv", target="y")
    with pytest.raises(ExperimentError, match="no such file"):
        load_experiment(write(text))
    assert load_experiment(write(text), base="sub").base == loaded.base


@pytest.mark.parametrize(
    "name", ["pkg:f", "pkg.mod:C.f", "./p.py:f", "p.py:C.f", "../{here}/p.py:f", "{abs}:f"]
)
def test_plugins_that_are_named_well(write, good: str, name: str) -> None:
    path = write(good)
    plugin = Path("p.py").absolute()
    plugin.write_text("")
    name = name.format(here=plugin.parent.name, abs=plugin)
    model = good.replace("mlp", name).replace("args: {hidden: [32]}", f"loss: {name}")
    path.write_text(model.replace("digits", name))
    experiment = load_experiment(path).experiment
    assert (experiment.model.name, experiment.model.loss, experiment.data.dataset) == (name,) * 3


@pytest.mark.parametrize("name", [r"a\0b.csv", "x" * 5000 + ".csv", r"\e.csv", "~/x.csv"])
def test_paths_that_no_system_has(write, good: str, name: str) -> None:
    with pytest.raises(ExperimentError, match=r"^exp.yaml:4:13: data.dataset.path: no such file"):
        load_experiment(write(good.replace("digits", f'{{path: "{name}", target: y}}')))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(ExperimentError) as caught:
        load_experiment(missing)
    assert str(caught.value) == f"{missing}: no such file"
    with pytest.raises(ExperimentError, match="cannot be read: Is a directory"):
        load_experiment(tmp_path)
    with pytest.raises(ExperimentError, match="cannot be read: embedded null byte"):
        load_experiment("a\0b")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1:1: the file is empty"),
        ("---\n", "1:1: the file is empty"),
        ("- a\n", "1:1: must be a mapping of sections, got a list"),
        ("hello\n", "1:1: must be a mapping of sections, got 'hello'"),
        ("!!set {a}\n", "1:1: tag !!set is not allowed; write the value"),
        ("!x y\n", "1:1: tag !x is not allowed; write the value"),
    ],
)
def test_files_that_are_no_mapping(write, text: str, line: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(text))
    assert str(caught.value) == f"exp.yaml:{line}"


def test_errors_can_be_pickled_and_compared() -> None:
    late, early = Problem("f", 2, 1, ("b",), "x"), Problem("f", 1, 3, ("a", 0), "y")
    error = ExperimentError([late, early, late])
    assert error.problems == (early, late)
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "f:1:3: a.0: y\nf:2:1: b: x"


def test_loading_imports_nothing_heavy_and_opens_no_connection(write, good: str) -> None:
    script = """
import socket, sys
def refuse(*args, **kwargs): raise RuntimeError("network")
socket.socket.connect = socket.getaddrinfo = refuse
from fedsim.experiment import dump_experiment, json_schema, load_experiment
dump_experiment(load_experiment(sys.argv[1]).experiment)
json_schema()
heavy = {"torch", "flwr", "ray", "sklearn", "matplotlib", "numpy", "scipy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    path = str(write(good))
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

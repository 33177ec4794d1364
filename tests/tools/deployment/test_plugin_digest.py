"""The digest of an app's plug-ins: the same on every machine, and another for every other code."""

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fedsim.cli import cli
from fedsim.experiment import load_experiment
from fedsim.planning.validation import plugin_digest

EXPERIMENT: dict[str, Any] = {
    "name": "plugged",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "./net.py:build"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
}


def digest(directory: Path, **changes: object) -> str | None:
    (directory / "net.py").write_text("import layers\n\ndef build(): ...\n")
    return plugin_digest(load_experiment(EXPERIMENT, changes, base=directory))


def test_deploy_and_validate_print_the_digest_that_the_node_computes(tmp_path: Path) -> None:
    """The operator of a node reads it off the app that arrived, not off the researcher's word."""
    (tmp_path / "layers.py").write_text("WIDTH = 1\n")
    expected = digest(tmp_path)
    assert expected is not None
    (tmp_path / "e.yaml").write_text(json.dumps(EXPERIMENT))
    app = tmp_path / "app"
    deploy = ["deploy", str(tmp_path / "e.yaml"), "--out", str(app)]
    validate = ["validate", str(app / "fedsim_app" / "experiment.yaml")]
    for command in (deploy, validate):
        printed = CliRunner().invoke(cli, command).output
        assert re.findall(r"plugin_digests of a node's policy: (\w+)", printed) == [expected]


def test_it_is_of_the_code_alone(tmp_path: Path) -> None:
    layers = tmp_path / "layers.py"
    layers.write_text("WIDTH = 1\n")
    first = digest(tmp_path)
    assert digest(tmp_path, seed=5, name="other") == first
    layers.write_text("WIDTH = 2\n")
    assert digest(tmp_path) != first, "an imported module is code too"
    layers.write_text("WIDTH = 1\n")
    (tmp_path / "unused.py").write_text("WIDTH = 1\n")
    assert digest(tmp_path) == first
    assert digest(tmp_path, **{"model.name": "./net.py:other"}) != first
    assert digest(tmp_path, **{"model.name": "logistic"}) is None

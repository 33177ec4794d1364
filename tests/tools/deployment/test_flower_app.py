"""`fedsim deploy`: a directory that Flower takes, and one line for every mistake."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.cli import cli
from fedsim.experiment import load_experiment
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.node_registration import registration_message
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.private_files import DeploymentError

EXPERIMENT: dict[str, Any] = {
    "name": "My_App.2",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "./net.py:build"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
}


def written(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "net.py").write_text("def build(): ...\n")
    write_app(load_experiment({**EXPERIMENT, **changes}, base=tmp_path), tmp_path / "app")
    return tmp_path / "app"


def test_flower_finds_both_apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = written(tmp_path)
    config = tomllib.loads((app / "pyproject.toml").read_text())
    assert config["project"]["name"] == "my-app-2"
    monkeypatch.syspath_prepend(app)
    for name, kind in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        module, attribute = config["tool"]["flwr"]["app"]["components"][name].split(":")
        try:
            __import__(module)
            assert isinstance(getattr(sys.modules[module], attribute), kind)
        finally:
            sys.modules.pop(module, None)
    sys.modules.pop("fedsim_app", None)
    assert (app / "fedsim_app" / "net.py").read_text() == "def build(): ...\n"
    assert load_experiment(app / "fedsim_app" / "experiment.yaml").experiment.name == "My_App.2"


def test_data_stay_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    data = {**EXPERIMENT["data"], "dataset": {"path": "table.csv", "target": "y"}}
    (tmp_path / "e.yaml").write_text(json.dumps({**EXPERIMENT, "data": data}))
    (tmp_path / "net.py").write_text("def build(): ...\n")
    arguments = ["deploy", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "app")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "a Flower app for 2 SuperNodes" in result.output
    assert f"{tmp_path / 'table.csv'}; copy it to this path on every node" in result.output
    assert not list((tmp_path / "app").rglob("*.csv"))
    again = CliRunner().invoke(cli, arguments)
    assert isinstance(again.exception, DeploymentError)
    assert "is not empty" in str(again.exception)


def test_a_file_of_budgets_is_one_that_every_node_must_have(tmp_path: Path) -> None:
    """Flower's bundle of an app has no csv file."""
    (tmp_path / "budgets.csv").write_text("client,epsilon\n0,3.0\n")
    asked = {"csv": "budgets.csv", "columns": {"target_epsilon": "epsilon"}}
    privacy = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 1.0}
    (tmp_path / "net.py").write_text("def build(): ...\n")
    content = {**EXPERIMENT, "privacy": {**privacy, "clients": {"asked": asked}}}
    app = write_app(load_experiment(content, base=tmp_path), tmp_path / "app")
    assert app.node_files == ((tmp_path / "budgets.csv").resolve(),)
    written = load_experiment(app.path / "fedsim_app" / "experiment.yaml").experiment.privacy
    assert written is not None
    assert written.clients["asked"].csv == str(app.node_files[0])


@pytest.mark.parametrize(("privacy", "warns"), [("seeded", True), ("secure", False), (None, False)])
def test_seeded_noise_is_warned_of(tmp_path: Path, privacy: str | None, warns: bool) -> None:
    (tmp_path / "net.py").write_text("def build(): ...\n")
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0, "noise": privacy}
    experiment = {**EXPERIMENT, "privacy": None if privacy is None else settings}
    (tmp_path / "e.yaml").write_text(json.dumps(experiment))
    arguments = ["deploy", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "app")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert ("can subtract the noise; where data need protection" in result.output) == warns


def test_a_plug_in_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "net.py").write_text("def build(): ...\n")
    model = {"name": "../net.py:build"}
    loaded = load_experiment({**EXPERIMENT, "model": model}, base=tmp_path / "inner")
    with pytest.raises(DeploymentError, match=r"\.\./net\.py:build: lies outside of"):
        write_app(loaded, tmp_path / "app")
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("name", ["client_app.py", "server_app.py", "__init__.py"])
def test_a_plug_in_does_not_replace_a_file_of_the_app(tmp_path: Path, name: str) -> None:
    """A node that ran the plug-in as its app would check no policy."""
    (tmp_path / name).write_text("def build(): ...\n")
    with pytest.raises(DeploymentError, match=rf"{name}: the app has .* of this name; rename"):
        written(tmp_path, model={"name": f"./{name}:build"})
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({}, r"partition-id=K' with K from 0 to 1 .* got None"),
        ({"partition-id": 2}, r"partition-id=K' with K from 0 to 1 .* got 2"),
        ({"partition-id": 0, "state": "relative"}, "must be an absolute path, got 'relative'"),
        ({"partition-id": 0, "state": "~nosuchuser/x"}, "absolute path, got '~nosuchuser/x'"),
    ],
)
def test_a_wrong_node_answers_what_is_wrong(
    tmp_path: Path, node_config: dict[str, Any], message: str
) -> None:
    from fedsim.tools.deployment.client_app import NodeClient

    app = NodeClient(written(tmp_path) / "fedsim_app")
    context = Context(
        run_id=1, node_id=5, node_config=node_config, state=RecordDict(), run_config={}
    )
    with server_identity(1):
        request: Message = registration_message(5)
        reply = app(request, context)
    assert reply.has_error()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reply.error.reason)

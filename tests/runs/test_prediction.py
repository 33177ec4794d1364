"""From a run to predictions: the same answers as the model, read as the run read its data."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedsim
from fedsim.cli import cli
from fedsim.core.errors import FedsimError, InputError
from fedsim.runs.runner import run_experiment

EXPERIMENT = {
    "name": "hospital",
    "data": {
        "dataset": {"path": "h.csv", "target": "ill", "columns": {"id": "drop"}},
        "partition": {"scheme": "iid", "num_clients": 2},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 4},
    "local": {"steps": 3, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0},
}


def table(count: int, *, seed: int = 0, target: bool = True) -> str:
    rng = np.random.default_rng(seed)
    lines = ["age,id,dose,ill" if target else "dose,age,id"]
    for number in range(count):
        age, dose = rng.normal(size=2)
        ill = "yes" if age - dose > 0 else "no"
        row = (age, f"p{number}", dose, ill) if target else (dose, age, f"p{number}")
        lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hospital")
    (path / "h.csv").write_text(table(400))
    (path / "new.csv").write_text(table(30, seed=1, target=False))
    (path / "known.csv").write_text(table(50, seed=2))
    run_experiment(EXPERIMENT, out=path / "run", base=path)
    return path


def test_predictions_are_those_of_the_model_whatever_the_order_of_columns(home: Path) -> None:
    found = fedsim.predict(home / "run", home / "new.csv", base=home)
    rows = list(csv.DictReader((home / "new.csv").open()))
    x = np.array([[row["age"], row["dose"]] for row in rows], np.float32)
    outputs = fedsim.load_model(home / "run", base=home)(torch.from_numpy(x)).detach()
    assert list(found.values) == [["no", "yes"][each] for each in outputs.argmax(1)]
    assert found.probabilities == pytest.approx(outputs.double().softmax(1).numpy())
    assert list(found.kept["id"]) == [row["id"] for row in rows]
    assert found.targets is found.scores is None
    assert fedsim.predict(home / "run", x, base=home).values == found.values


def test_targets_of_the_file_are_scored(home: Path) -> None:
    found = fedsim.predict(home / "run", home / "known.csv", base=home)
    rows = list(csv.DictReader((home / "known.csv").open()))
    targets = [row["ill"] for row in rows]
    assert found.targets == targets
    right = np.mean([a == b for a, b in zip(found.values, targets, strict=True)])
    assert found.scores is not None
    assert found.scores["metrics"] == {"accuracy": right}
    assert sum(map(sum, found.scores["confusion"])) == 50


def command(*arguments: str) -> None:
    cli.main(["predict", *arguments], standalone_mode=False)


def test_the_command_writes_a_table_and_overwrites_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new, known = (str(home / name) for name in ("run", "new.csv", "known.csv"))
    command(run, new, "--base", str(home))
    text, talk = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert talk == ""
    assert list(rows[0]) == ["id", "prediction", "probability", "p_no", "p_yes"]
    assert len(rows) == 30
    assert float(rows[0]["p_no"]) + float(rows[0]["p_yes"]) == pytest.approx(1, abs=1e-5)
    command(run, known, "--base", str(home), "--out", str(tmp_path / "p.csv"))
    text, talk = capsys.readouterr()
    assert text == ""
    assert "majority baseline" in talk
    assert f"50 predictions: {tmp_path / 'p.csv'}" in talk
    with pytest.raises(SystemExit):
        command(run, known, "--out", str(tmp_path / "p.csv"))
    assert "nothing is overwritten" in capsys.readouterr().err
    command(run, known, "--base", str(home), "--json")
    content = json.loads(capsys.readouterr().out)
    assert len(content["predictions"]["target"]) == 50


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "none.csv: no such file"),
        ("x.txt", "a", "must be in a .csv, .parquet or .npz file"),
        ("a.csv", "age,id\n1,p\n", "dose"),
        ("b.csv", "age,dose\n1,old\n", "'old' is not a finite number"),
        ("c.csv", "age,dose\n", "no rows"),
        ("d.csv", "age,dose,ill\n1,2,maybe\n", "'maybe' is no class of the model"),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    home: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(FedsimError, match=message) as caught:
        fedsim.predict(home / "run", tmp_path / name, base=home)
    assert "\n" not in str(caught.value)


def test_features_of_another_shape_are_refused(home: Path) -> None:
    with pytest.raises(InputError, match=r"shape \(3,\), and the model takes \(2,\)"):
        fedsim.predict(home / "run", np.zeros((5, 3)), base=home)
    with pytest.raises(InputError, match="no examples"):
        fedsim.predict(home / "run", np.zeros((0, 2)), base=home)


def test_the_model_says_what_it_is_when_its_file_leaves_the_run(home: Path) -> None:
    with safe_open(home / "run" / "model.safetensors", framework="pt") as file:
        card = json.loads(file.metadata()["fedsim"])
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert card["class_names"] == summary["classes"] == ["no", "yes"]
    assert card["columns"] == ["age", "dose"]
    assert card["metrics"]["accuracy"] == summary["test_accuracy"]
    privacy = json.loads((home / "run" / "privacy.json").read_text())
    assert card["statement"] == privacy["statement"]
    assert fedsim.read_model_card(home / "run").to_json() == card


@pytest.mark.slow
def test_labels_and_numbers_are_predicted(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    targets: dict[str, Any] = {
        "bce": (x[:, :2] > 0.3).astype(np.float32),
        "mse": x[:, 0] * 2 + 1,
    }
    for loss, y in targets.items():
        np.savez(tmp_path / f"{loss}.npz", x=x, y=y)
        source = {
            **EXPERIMENT,
            "data": {
                "dataset": {"path": f"{loss}.npz", "target": "y"},
                "partition": {"scheme": "iid", "num_clients": 2},
            },
            "model": {"name": "logistic", "loss": loss},
            "privacy": None,
            "local": {"steps": 3, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.1}},
        }
        run_experiment(source, out=tmp_path / loss, base=tmp_path)
        found = fedsim.predict(tmp_path / loss, tmp_path / f"{loss}.npz", base=tmp_path)
        outputs = fedsim.load_model(tmp_path / loss, base=tmp_path)(torch.from_numpy(x)).detach()
        assert found.scores is not None
        if loss == "mse":
            assert list(found.columns) == ["prediction", "target"]
            assert found.values == pytest.approx(outputs[:, 0].tolist())
            assert found.scores["metrics"]["r2"] == pytest.approx(1, abs=0.5)
        else:
            assert list(found.columns)[:4] == ["prediction_0", "prediction_1", "p_0", "p_1"]
            assert found.values == (outputs > 0).int().tolist()

"""Runs whose clients only the data know: settings, records, resume and deployment."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.experiment import ExperimentError, load_experiment
from fedsim.planning.validation import find_footprint
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.policy import NodePolicy
from fedsim.tools.deployment.policy_rules import PolicyRefusalError, check_experiment
from fedsim.tools.deployment.private_files import DeploymentError


def experiment(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = [f"{i % 7},{'ABC'[i % 3]},{i % 2}" for i in range(60)]
    (folder / "h.csv").write_text("age,site,ill\n" + "\n".join(rows) + "\n")
    raw = {
        "name": "sites",
        "data": {
            "dataset": {"path": "h.csv", "target": "ill", "columns": {"age": {"range": [0, 9]}}},
            "partition": {"scheme": "column", "column": "site"},
        },
        "model": {"name": "logistic"},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-3, "max_grad_norm": 1.0},
    }
    return raw | changes


def test_a_run_records_number_and_names_of_clients_and_goes_on(tmp_path: Path) -> None:
    raw, out = experiment(tmp_path), tmp_path / "run"
    run_experiment(raw, out=out, base=tmp_path)
    recorded = yaml.safe_load((out / "experiment.yaml").read_text())
    assert recorded["data"]["partition"]["num_clients"] == 3
    rows = json.loads((out / "privacy.json").read_text())["clients"]
    assert [row["name"] for row in rows] == ["A", "B", "C"]
    with (out / "clients.csv").open(newline="") as table:
        assert [row["name"] for row in csv.DictReader(table)] == ["A", "B", "C"]
    longer = raw | {"federation": {"rounds": 2}}
    assert len(run_experiment(longer, out=out, base=tmp_path, resume=True).rounds) == 2
    assert not verify_run(RunDirectory.open(out)).problems


def test_a_function_is_called_alike_when_its_run_goes_on(tmp_path: Path) -> None:
    """The run's file names the number of clients, which a function need not take."""
    (tmp_path / "p.py").write_text("def f(features, targets, seed):\n    return targets\n")
    raw, out = experiment(tmp_path), tmp_path / "run"
    raw["data"]["partition"] = {"scheme": "./p.py:f"}
    raw["data"]["dataset"]["columns"]["site"] = "drop"
    run_experiment(raw, out=out, base=tmp_path)
    longer = raw | {"federation": {"rounds": 2}}
    assert len(run_experiment(longer, out=out, base=tmp_path, resume=True).rounds) == 2
    assert not verify_run(RunDirectory.open(out)).problems


def test_clients_without_names_have_no_column(tmp_path: Path) -> None:
    raw = experiment(tmp_path, privacy=None)
    raw["data"]["partition"] = {"scheme": "iid", "num_clients": 2}
    raw["data"]["dataset"]["columns"]["site"] = "drop"
    run_experiment(raw, out=tmp_path / "run", base=tmp_path)
    assert "name" not in (tmp_path / "run" / "clients.csv").read_text().split("\n")[0]
    rows = json.loads((tmp_path / "run" / "privacy.json").read_text())["clients"]
    assert not any("name" in row for row in rows)


def test_keys_are_checked_against_the_number_that_the_data_have(tmp_path: Path) -> None:
    raw = experiment(tmp_path, federation={"rounds": 1, "clients_per_round": 4})
    with pytest.raises(ExperimentError, match=r"clients_per_round: must be <= .*\(3\), got 4"):
        run_experiment(raw, out=tmp_path / "run", base=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_refuses_another_number_of_clients(tmp_path: Path) -> None:
    raw, out = experiment(tmp_path), tmp_path / "run"
    run_experiment(raw, out=out, base=tmp_path)
    table = tmp_path / "h.csv"
    table.write_text(table.read_text() + "1,D,0\n" * 20)
    with pytest.raises(ValueError, match="num_clients is 3, and scheme column gives 4"):
        run_experiment(raw | {"federation": {"rounds": 2}}, out=out, base=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset": {"target": "ill"}}, "data.dataset.path: missing; file.npz"),
        (
            {"partition": {"scheme": "files", "pattern": "*.csv"}},
            "path: data.partition.pattern names",
        ),
        (
            {"dataset": {"target": "ill"}, "partition": {"scheme": "files", "pattern": "x/*.csv"}},
            "data.partition.pattern: no file matches",
        ),
        (
            {"partition": {"scheme": "column", "column": "ill"}},
            "column: 'ill' is the target, and a",
        ),
        (
            {"partition": {"scheme": "column", "column": "age"}},
            "columns.age: this column divides the",
        ),
        ({"partition": {"scheme": "./no.py:f"}}, "scheme: no such file"),
        ({"partition": {"scheme": "NaturalIdPartitoner"}}, "did you mean 'NaturalIdPartitioner'?"),
        (
            {"dataset": {"path": "h.csv", "target": "ill", "test": "h.csv"}, "test_fraction": 0.1},
            "data.test_fraction: dataset.test is the test set",
        ),
        ({"features": "tokens"}, "columns.age: makes numbers of the cells, and data.features"),
    ],
)
def test_combinations_are_refused_when_the_file_is_read(
    data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = experiment(tmp_path)
    raw["data"] |= data
    with pytest.raises(ExperimentError) as caught:
        load_experiment(raw, base=tmp_path)
    assert message in str(caught.value)


def test_footprint_names_every_file_and_function(tmp_path: Path) -> None:
    raw = experiment(tmp_path)
    (tmp_path / "p.py").write_text("def f(x, y, seed): ...\n")
    (tmp_path / "m.py").write_text("def f2(outputs, targets): ...\n")
    raw["data"]["partition"] = {"scheme": "./p.py:f"}
    raw["evaluation"] = {"metrics": ["accuracy", "./m.py:f2"]}
    found = find_footprint(load_experiment(raw, base=tmp_path))
    assert found.code == ("./p.py:f", "./m.py:f2")
    assert {path.name for path in found.files} == {"h.csv", "p.py", "m.py"}
    del raw["evaluation"]
    raw["data"] |= {
        "dataset": {"target": "ill", "test": "h.csv"},
        "partition": {"scheme": "files", "pattern": "*.csv"},
    }
    assert [path.name for path in find_footprint(load_experiment(raw, base=tmp_path)).files] == [
        "h.csv",
        "h.csv",
    ]


def test_an_app_names_its_nodes_before_it_sees_data(tmp_path: Path) -> None:
    raw = experiment(tmp_path)
    with pytest.raises(DeploymentError, match=r"data.partition.num_clients: missing"):
        write_app(load_experiment(raw, base=tmp_path), tmp_path / "app")
    raw["data"]["partition"]["num_clients"] = 3
    assert write_app(load_experiment(raw, base=tmp_path), tmp_path / "app").num_nodes == 3
    raw["data"] |= {
        "dataset": {"target": "ill"},
        "partition": {"scheme": "files", "pattern": "h.csv"},
    }
    with pytest.raises(DeploymentError, match="files is for simulations"):
        write_app(load_experiment(raw, base=tmp_path), tmp_path / "other")


def test_a_node_reads_no_pattern_of_files(tmp_path: Path) -> None:
    # The server chooses the pattern: with a ledger for each set of files, it could spend a budget
    # twice on the same examples.
    raw = experiment(tmp_path)
    raw["data"] |= {
        "dataset": {"target": "ill"},
        "partition": {"scheme": "files", "pattern": "h.csv", "num_clients": 1},
    }
    loaded = load_experiment(raw, base=tmp_path)
    for policy in (NodePolicy(), NodePolicy(data_name="ward")):
        with pytest.raises(PolicyRefusalError, match="reads whatever a pattern matches"):
            check_experiment(policy, loaded)

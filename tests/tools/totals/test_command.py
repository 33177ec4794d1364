"""`fedsim totals` on runs, from the command line to the entry of the registry."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import fedsim
from fedsim.cli import cli
from fedsim.experiment import ExperimentError
from fedsim.runs.files import DamagedRunError
from fedsim.tools.totals.sources import SourceError

EXPERIMENT: dict[str, Any] = {
    "name": "Trial.A",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 2, "batch_size": 30, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"target_epsilon": 3.0, "delta": 1e-4, "max_grad_norm": 1.0},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of different seeds."""
    base = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        (base / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT | {"seed": seed}))
        fedsim.run(base / "e.yaml", out=base / f"run{seed}")
    return base


def account(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        cli, ["totals", *map(str, arguments)], catch_exceptions=False, standalone_mode=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_one_run_has_the_epsilon_of_its_privacy_file(runs: Path) -> None:
    found = json.loads(account(runs / "run0", "--json"))
    privacy = json.loads((runs / "run0" / "privacy.json").read_text())
    assert [row["epsilon"] for row in found["clients"]] == [
        row["epsilon"] for row in privacy["clients"]
    ]
    assert found["system_epsilon"] == privacy["system_epsilon"]
    assert found["unit"], found["against"] == ("example", "server")


def test_two_runs_are_added_up_and_registered(runs: Path, tmp_path: Path) -> None:
    text = account(runs / "run0", runs / "run1", "--registry", tmp_path / "entry.yaml")
    assert "Privacy spent over 2 sources" in text
    assert "largest ε = " in text
    drawn = (tmp_path / "entry.yaml").read_text()
    assert "simulation, not a deployment" in drawn
    entry = yaml.safe_load(drawn)
    parameters = entry["deployment"]["privacy_loss"]["privacy_parameters"]
    found = json.loads(account(runs / "run0", runs / "run1", "--json"))
    assert parameters["delta"] == 1e-4
    assert found["system_epsilon"] <= parameters["epsilon"] <= found["system_epsilon"] * 1.001
    assert set(entry) == {"url_slug", "deployment"}
    assert entry["url_slug"] == "trial-a"
    assert "one run only" not in drawn
    again = json.loads(account(tmp_path / "entry.yaml", "--delta", "1e-4", "--json"))
    assert again["system_epsilon"] == parameters["epsilon"]


def test_an_interrupted_run_is_counted_from_its_ledger(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run0", tmp_path / "cut")
    (tmp_path / "cut" / "privacy.json").unlink()
    assert "has not ended; it is counted up to its last record" in account(tmp_path / "cut")
    # The whole run repeats what the interrupted one released.
    found = json.loads(account(tmp_path / "cut", runs / "run0", "--json"))
    assert len(found["sources"]) == len(found["repeated"]) == 1


def test_a_ledger_file_needs_a_delta(runs: Path) -> None:
    ledger = runs / "run0" / "ledger.jsonl"
    with pytest.raises(SourceError, match=r"client 0 has no δ"):
        account(ledger)
    text = account(ledger, "--delta", "1e-4", "--accountant", "rdp")
    assert "ε (rdp)" in text


def test_clients_of_a_map_file(runs: Path, tmp_path: Path) -> None:
    names = [str(runs / "run0"), str(runs / "run1")]
    clients = {"a": [f"{names[0]}:0", f"{names[1]}:1"], "b": [f"{names[0]}:1", f"{names[1]}:0"]}
    (tmp_path / "clients.yaml").write_text(yaml.safe_dump(clients))
    found = json.loads(account(*names, "--clients", tmp_path / "clients.yaml", "--json"))
    assert [row["client"] for row in found["clients"]] == ["a", "b"]
    (tmp_path / "clients.yaml").write_text("a: 3")
    with pytest.raises(SourceError, match=r"must map each client to a list of places"):
        account(*names, "--clients", tmp_path / "clients.yaml")


def test_a_run_without_privacy_has_no_total(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run0", tmp_path / "open")
    content = yaml.safe_load((tmp_path / "open" / "experiment.yaml").read_text())
    content["privacy"] = None
    (tmp_path / "open" / "experiment.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SourceError, match=r"trained without privacy"):
        account(tmp_path / "open")


def test_settings_that_no_run_wrote_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copy(runs / "run0" / "environment.json", tmp_path / "environment.json")
    for text in ("name: x", "a: [", "privacy: {delta: 1}\nname: x\nseed: 0"):
        (tmp_path / "experiment.yaml").write_text(text)
        with pytest.raises(ExperimentError, match=r"experiment\.yaml"):
            account(tmp_path)
    shutil.copy(runs / "run0" / "experiment.yaml", tmp_path / "experiment.yaml")
    (tmp_path / "releases.jsonl").touch()
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(SourceError, match="no client of the run has spent anything"):
        account(tmp_path)


def test_a_run_whose_ledger_is_gone_has_not_spent_nothing(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "run0", tmp_path / "r")
    ledger = run / "ledger.jsonl"
    first, *_ = ledger.read_text().splitlines(keepends=True)
    for left in ("", first):
        ledger.write_text(left)
        with pytest.raises(DamagedRunError, match=r"it lacks the record of client \d that privacy"):
            account(run)
    ledger.unlink()
    with pytest.raises(DamagedRunError, match=r"ledger\.jsonl: the file is missing"):
        account(run)


def test_runs_with_secure_noise_are_spends_of_their_own(tmp_path: Path) -> None:
    """Their charges are equal: no digest of examples is in them."""
    secure = {"privacy.noise": "secure", "federation.rounds": 1}
    for name in ("one", "two"):
        fedsim.run(EXPERIMENT, overrides=secure, out=tmp_path / name)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    found = json.loads(account(*(tmp_path / n for n in ("one", "two", "copy")), "--json"))
    assert found["repeated"] == [str(tmp_path / "copy")]
    assert len(found["sources"]) == 2
    alone = json.loads(account(tmp_path / "one", "--json"))
    assert found["system_epsilon"] > 1.1 * alone["system_epsilon"]

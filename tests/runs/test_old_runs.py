"""Runs, comparisons and node states of older versions: readable, but not continued."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fedsim
from fedsim.cli import cli
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.deployment.node_state import client_ledger
from fedsim.experiment import load_experiment
from fedsim.runs.directory import RunDirectory, clients_table
from fedsim.runs.runner import run_experiment
from fedsim.runs.schema import CHECKPOINT_SCHEMA, NODE_STATE_SCHEMA, RUN_SCHEMA, Origin, SchemaError
from fedsim.runs.verification import verify_run

FROZEN = Path(__file__).parent / "frozen" / "0.1.0"
NOW = fedsim.__version__


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a copy of everything that fedsim 0.1.0 wrote."""
    return Path(shutil.copytree(FROZEN, tmp_path / "old"))


def fedsim_command(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(result.exception, FedsimError | SystemExit | None), result.exception
    return result


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(("name", "epsilon"), [("run", 4), ("secure_run", 0.7248)])
def test_an_old_run_is_printed(old: Path, name: str, epsilon: float) -> None:
    result = fedsim_command("report", old / name)
    assert result.exit_code == 0, result.output
    assert f"every client within ε = {epsilon} at δ = 0.001" in result.stdout
    assert "written by fedsim 0.1.0 (run schema 1); the privacy statement" in result.stderr
    assert "Every ε was computed by fedsim 0.1.0" in (old / name / "report.html").read_text()


@pytest.mark.parametrize("name", ["run", "secure_run", "comparison/runs/plain/seed-7"])
def test_an_old_run_is_sound_but_for_what_cannot_be_checked(old: Path, name: str) -> None:
    result = fedsim_command("verify", old / name)
    assert result.exit_code == 0, result.output
    assert "sound" in result.stdout
    assert result.stderr == (
        f"{old / name}: not checked: the wording of the privacy statement, which is that of fedsim "
        f"0.1.0 (run schema 1); this is fedsim {NOW}\n"
        f"{old / name}: not checked: that no file changed, and that rounds, checkpoint and "
        "experiment agree with the ledger: run schema 1 has no manifest.json\n"
    )
    found = json.loads(fedsim_command("verify", old / name, "--json").stdout)
    assert found["sound"]
    assert len(found["unchecked"]) == 2
    assert found["root"] is None


def scale_epsilons(run: Path, factor: float) -> None:
    """Multiply every ε of a run's files, as a version with another accountant would."""
    by_file: dict[str, Callable[[dict[str, Any]], object]] = {
        "privacy.json": lambda found: (
            found.update(system_epsilon=factor * found["system_epsilon"]),
            [
                row.update({name: factor * row[name] for name in ("epsilon", "epsilon_rdp")})
                for row in found["clients"]
            ],
        ),
        "summary.json": lambda found: found.update(
            epsilon={name: factor * value for name, value in found["epsilon"].items()}
        ),
    }
    for name, change in by_file.items():
        edit_json(run / name, change)
    rows = json.loads((run / "privacy.json").read_text())["clients"]
    columns = (run / "clients.csv").read_text().split("\n", 1)[0].split(",")
    (run / "clients.csv").write_text(clients_table(rows, columns))


def test_a_larger_epsilon_of_another_version_is_named_and_a_smaller_one_is_a_problem(
    old: Path,
) -> None:
    """Random allocation had Rényi's bound in 0.1.0; today's ε of such a ledger is smaller."""
    scale_epsilons(old / "run", 1.2)
    found = verify_run(RunDirectory.open(old / "run"))
    assert found.problems == ()
    (line,) = [line for line in found.unchecked if "larger than today's" in line]
    assert line.startswith("that ε of clients 0, 1, 2 is the one that the run's version computes")
    assert "4.8, today 4)" in line
    scale_epsilons(old / "run", 0.8)
    found = verify_run(RunDirectory.open(old / "run"))
    assert sum("is reported as" in problem for problem in found.problems) == 6
    assert not any("larger than today's" in line for line in found.unchecked)


def test_a_larger_epsilon_of_this_version_is_a_problem(tmp_path: Path) -> None:
    overrides = {"federation.rounds": 1}
    run_experiment(FROZEN / "experiment.yaml", overrides=overrides, out=tmp_path / "run")
    scale_epsilons(tmp_path / "run", 1.2)
    found = verify_run(RunDirectory.open(tmp_path / "run"))
    assert sum("is reported as" in problem for problem in found.problems) == 6
    assert found.unchecked == ()


def test_a_run_of_this_version_is_checked_whole(tmp_path: Path) -> None:
    result = run_experiment(
        FROZEN / "experiment.yaml", overrides={"federation.rounds": 1}, out=tmp_path / "run"
    )
    directory = RunDirectory.open(result.path)
    assert directory.origin == Origin(NOW, RUN_SCHEMA)
    assert verify_run(directory).unchecked == ()


@pytest.mark.parametrize("position", [0, 40, 1500, -2])
def test_a_changed_byte_of_an_old_ledger_is_found(old: Path, position: int) -> None:
    ledger = old / "run" / "ledger.jsonl"
    content = bytearray(ledger.read_bytes())
    content[position] ^= 1
    ledger.write_bytes(bytes(content))
    result = fedsim_command("verify", old / "run")
    assert result.exit_code == ExitCode.FAILED
    assert "ledger.jsonl, " in result.stderr


def test_a_changed_figure_of_an_old_run_is_found(old: Path) -> None:
    edit_json(old / "run" / "privacy.json", lambda found: found.update(system_epsilon=3.0))
    assert "system_epsilon" in "".join(verify_run(RunDirectory.open(old / "run")).problems)


def test_an_old_run_is_not_resumed(old: Path) -> None:
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    file, run = old / "experiment.yaml", old / "run"
    result = fedsim_command("run", file, "--out", run, "--resume")
    assert isinstance(result.exception, SchemaError)
    assert result.exception.exit_code == ExitCode.WRONG_INPUT
    assert str(result.exception) == (
        f"{run} was written by fedsim 0.1.0 (run schema 1); this is fedsim {NOW} (schema "
        f"{RUN_SCHEMA}): resume it with fedsim 0.1.0, or start a new run with another --out"
    )
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_schema_is_refused(old: Path) -> None:
    """As between two checkouts of one version; 0.1.0 wrote no number, which is schema 1."""
    edit_json(
        old / "run" / "environment.json", lambda found: found.update(fedsim=NOW, schema=RUN_SCHEMA)
    )
    expected = rf"checkpoint schema 1\); this is fedsim {NOW} \(schema {CHECKPOINT_SCHEMA}\): "
    with pytest.raises(SchemaError, match=expected):
        RunDirectory.open(old / "run").read_checkpoint()


def test_what_a_newer_version_wrote_is_refused(old: Path) -> None:
    change = {"fedsim": "9.0", "schema": RUN_SCHEMA + 1}
    edit_json(old / "run" / "environment.json", lambda found: found.update(change))
    for command in ("report", "verify"):
        result = fedsim_command(command, old / "run")
        assert isinstance(result.exception, SchemaError), command
        assert result.exception.exit_code == ExitCode.WRONG_INPUT
        assert f"written by fedsim 9.0 (run schema {RUN_SCHEMA + 1})" in str(result.exception)
        assert "use a newer fedsim" in str(result.exception)
    record = old / "comparison" / "runs" / "plain" / "seed-7" / "comparison_run.json"
    edit_json(record, lambda found: found.update(schema=9))
    result = fedsim_command("compare", old / "compare.yaml", "--out", old / "comparison")
    assert isinstance(result.exception, SchemaError)
    assert "comparison schema 9" in str(result.exception)


@pytest.mark.parametrize("content", ['{"schema": "two"}', '{"fedsim": 3}'])
def test_an_environment_without_a_version_is_refused(old: Path, content: str) -> None:
    (old / "run" / "environment.json").write_text(content)
    with pytest.raises(SchemaError, match="name no version"):
        RunDirectory.open(old / "run")


@pytest.mark.slow  # four more processes
def test_runs_of_an_old_comparison_are_set_aside_and_counted(old: Path) -> None:
    """Their charges stay charged: the cost of tuning covers them."""
    out = old / "comparison"
    result = fedsim_command(
        "compare", old / "compare.yaml", "--out", out, "--workers", "1", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads((out / "comparison.json").read_text())
    assert [run["reused"] for variant in found["variants"] for run in variant["runs"]] == [
        False
    ] * 4
    assert found["tuning"]["everything"]["runs"] == 8
    assert RunDirectory.open(out / "runs/plain/seed-7").origin.version == NOW
    set_aside = RunDirectory.open(out / "superseded/private/seed-8-1")
    assert set_aside.origin == Origin("0.1.0", 1)
    assert verify_run(set_aside).problems == ()


def test_a_node_refuses_old_state(old: Path) -> None:
    state = old / "node_state"
    for path in (state, *state.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    experiment = load_experiment(old / "experiment.yaml").experiment
    expected = (
        rf"client-0 was written by fedsim 0\.1\.0 \(node state schema 1\); this is fedsim {NOW} "
        rf"\(schema {NODE_STATE_SCHEMA}\): continue with fedsim 0\.1\.0 on every node, or choose "
        "another seed"
    )
    with pytest.raises(SchemaError, match=expected) as refused:
        client_ledger(state, experiment, 0)
    assert refused.value.exit_code == ExitCode.WRONG_INPUT
    other = load_experiment(old / "experiment.yaml", {"seed": 8}).experiment
    assert client_ledger(state, other, 0).parent.parent.name == "seed-8"
    assert client_ledger(state, other, 0).is_file()

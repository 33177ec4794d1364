"""What `fedsim init` writes runs as it stands, and nothing is overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedsim.cli import cli
from fedsim.experiment import load_experiment
from fedsim.runs.runner import run_experiment
from fedsim.starter import STARTER_FILES, StarterError, write_starter


def test_the_files_are_a_valid_experiment_with_the_directorys_name(tmp_path: Path) -> None:
    written = write_starter(tmp_path / "hearts")
    assert [path.name for path in written] == list(STARTER_FILES)
    loaded = load_experiment(tmp_path / "hearts" / "experiment.yaml")
    assert loaded.experiment.name == "hearts"
    assert loaded.experiment.privacy is not None
    assert loaded.experiment.plugins == ("./model.py:build",)
    comments = (tmp_path / "hearts" / "experiment.yaml").read_text().count("#")
    assert comments > 30


@pytest.mark.parametrize("name", ["1e5", "a b", "ärzte", "-x", "null", "Off"])
def test_a_directory_whose_name_is_no_experiments_name(tmp_path: Path, name: str) -> None:
    write_starter(tmp_path / name)
    text = (tmp_path / name / "experiment.yaml").read_text()
    assert isinstance(yaml.safe_load(text)["name"], str)
    load_experiment(tmp_path / name / "experiment.yaml")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StarterError, match="is not empty; name a new or empty directory"):
        write_starter(tmp_path)
    with pytest.raises(StarterError, match="is a file"):
        write_starter(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command_says_what_it_wrote_and_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["init", str(tmp_path / "new")], standalone_mode=False)
    out = capsys.readouterr().out
    for text in (*STARTER_FILES, "fedsim run experiment.yaml", "python -m pytest test_model.py"):
        assert text in out


@pytest.mark.slow
def test_the_tests_that_it_comes_with_pass(tmp_path: Path) -> None:
    write_starter(tmp_path / "new")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model.py"],
        cwd=tmp_path / "new",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_the_experiment_runs_and_learns(tmp_path: Path) -> None:
    write_starter(tmp_path / "new")
    result = run_experiment(tmp_path / "new" / "experiment.yaml", out=tmp_path / "r")
    assert result.status == "completed"
    assert result.metrics["test_accuracy"] > 0.88

"""A finished run may be reused exactly as long as nothing it depends on has changed."""

from pathlib import Path

import pytest

from fedsim.comparison.jobs import _file_digest, run_fingerprint
from fedsim.experiment import load_experiment

PLUGIN = "import numpy as np\n\ndef load(seed=0):\n    return np.zeros((9, 2)), np.arange(9) % 2\n"


def digest(directory: Path, **overrides: object) -> str:
    return run_fingerprint(load_experiment(directory / "tiny.yaml", overrides))


def test_it_is_the_same_for_the_same_experiment(directory: Path) -> None:
    written_out = digest(
        directory, **{"data.partition.min_examples": 1, "privacy.clipping": "flat"}
    )
    assert digest(directory) == written_out


@pytest.mark.parametrize(
    "overrides",
    [{"seed": 1}, {"privacy": None}, {"privacy.delta": 1e-5}, {"local.optimizer.lr": 0.4}],
)
def test_every_setting_counts(directory: Path, overrides: dict[str, object]) -> None:
    assert digest(directory) != digest(directory, **overrides)


@pytest.mark.parametrize("overrides", [{"name": "other"}, {"runtime.device": "cpu"}])
def test_what_changes_no_result_does_not_count(
    directory: Path, overrides: dict[str, object]
) -> None:
    assert digest(directory) == digest(directory, **overrides)


def test_the_content_of_a_plug_in_counts(directory: Path) -> None:
    (directory / "data.py").write_text(PLUGIN)
    before = digest(directory, **{"data.dataset": "./data.py:load"})
    (directory / "data.py").write_text(PLUGIN.replace("9", "8"))
    assert digest(directory, **{"data.dataset": "./data.py:load"}) != before


def test_text_that_begins_like_a_home_directory_counts_as_text(directory: Path) -> None:
    (directory / "data.py").write_text(PLUGIN)
    one, other = (
        digest(directory, **{"data.dataset": "./data.py:load", "data.args": {"mark": mark}})
        for mark in ("~5 clients", "~nobody.csv")
    )
    assert one != other


def test_the_content_of_a_module_counts_and_it_is_not_imported(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = directory / "my_package_of_data"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "digits.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(directory)
    name = {"data.dataset": "my_package_of_data.digits:load"}
    before = digest(directory, **name)
    (package / "digits.py").write_text(PLUGIN.replace("9", "8"))
    assert digest(directory, **name) != before


def test_the_content_of_a_data_file_counts(directory: Path) -> None:
    name = {"data.dataset": {"path": "table.csv", "target": "y"}}
    (directory / "table.csv").write_text("a,y\n1,0\n2,1\n")
    before = digest(directory, **name)
    (directory / "table.csv").write_text("a,y\n1,0\n2,3\n")
    assert digest(directory, **name) != before


def test_a_fingerprint_of_a_data_file_tests_no_guess(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in comparison_run.json: of the bytes alone it would tell which of two files it was."""
    name = {"data.dataset": {"path": "table.csv", "target": "y"}}
    (directory / "table.csv").write_text("a,y\n1,0\n2,1\n")
    before = digest(directory, **name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    _file_digest.cache_clear()
    assert digest(directory, **name) != before


def test_the_same_files_elsewhere_are_the_same_run(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    for place in (directory, other):
        (place / "data.py").write_text(PLUGIN)
    (other / "tiny.yaml").write_bytes((directory / "tiny.yaml").read_bytes())
    name = {"data.dataset": "./data.py:load"}
    assert digest(directory, **name) == digest(other, **name)

"""Verdicts, the command, records and the page of the reproductions."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fedsim.comparison.statistics import t_interval

NAMES = ("rows", "study", "records", "runs", "__main__")


@pytest.fixture
def frame() -> dict[str, ModuleType]:
    return {name: import_module(f"experiments.reproductions.{name}") for name in NAMES}


@pytest.fixture
def call(
    frame: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Call the command on a study that measures `value`; its records are kept apart."""
    study, rows, main = frame["study"], frame["rows"], frame["__main__"]

    def run(*arguments: str, value: float = 1.0, files: tuple[Any, ...] = ()) -> Result:
        def measure(setup: Any) -> list[Any]:
            measured = value + len(setup.seeds) / 100
            return [
                rows.number_row("x", 1.0, measured, tolerance=0.1),
                rows.context_row("y", "of no publication"),
            ]

        one = study.Study(
            title="T",
            source="S",
            settings="as published",
            measure=measure,
            seeds={"reduced": 1, "full": 2},
            files=files,
            remark="another optimizer",
        )
        monkeypatch.setattr(main, "find_studies", lambda: {"one": one})
        monkeypatch.setattr(main, "PAGE", tmp_path / "page.md")
        monkeypatch.setattr(
            main, "write_record", lambda record: frame["records"].write_record(record, tmp_path)
        )
        monkeypatch.setattr(main, "read_records", lambda: frame["records"].read_records(tmp_path))
        return CliRunner().invoke(main.main, [*arguments, "--data", str(tmp_path)])

    (tmp_path / "page.md").write_text("# Page\n")
    return run


def test_a_number_agrees_within_its_tolerance(frame: dict[str, ModuleType]) -> None:
    number = frame["rows"].number_row
    assert number("x", 1.0, 1.1, tolerance=0.11).verdict == "agrees"
    assert number("x", 1.0, 0.88, tolerance=0.11).verdict == "differs"
    row = number("x", 1.0, t_interval([1.0, 1.2, 1.4]), tolerance=0.25)
    assert (row.verdict, row.measured) == ("agrees", "1.20 [0.70, 1.70], 3 seeds")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([-1.0, -1.1, -0.9], "agrees"), ([1.0, 1.1, 0.9], "differs"), ([-1.0, 1.0, 0.1], "unclear")],
)
def test_an_order_is_judged_by_its_interval(
    frame: dict[str, ModuleType], differences: list[float], verdict: str
) -> None:
    order = frame["rows"].order_row
    baseline = [5.0, 7.0, 3.0]
    values = np.add(baseline, differences).tolist()
    assert order("x", "smaller", values, baseline, larger=False).verdict == verdict
    swapped = order("x", "larger", baseline, values, larger=True)
    assert swapped.verdict == verdict


def test_one_seed_shows_no_order(frame: dict[str, ModuleType]) -> None:
    assert frame["rows"].order_row("x", "smaller", [1.0], [2.0], larger=False).verdict == "unclear"


def test_a_law_and_a_limit(frame: dict[str, ModuleType]) -> None:
    law, limit = frame["rows"].law_row, frame["rows"].limit_row
    assert law("x", "one law", 0.02, false_alarm=0.01).verdict == "agrees"
    assert law("x", "one law", 0.005, false_alarm=0.01).verdict == "differs"
    assert limit("seconds", 200.0, 200.0).verdict == "agrees"
    assert limit("seconds", 200.0, 200.1).verdict == "differs"


def test_the_command_prints_the_table_and_writes_record_and_page(
    call: Callable[..., Result], tmp_path: Path
) -> None:
    result = call("--write", "--size", "full")
    assert result.exit_code == 0
    assert {"S. as published", "agrees", "of no publication"} <= set(
        re.split(r"\s*[│\n]\s*", result.output)
    )
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Page\n")
    assert re.search(
        r"\| \*\*T\*\* \(S\) \|  \| `one --size full`, [\d-]+ \| another optimizer \|", page
    )
    assert "| x | 1.00 | 1.02 | agrees (± 0.10) |" in page
    assert "of no publication" not in page
    call("--write", "--seeds", "5")  # a reduced size does not take the place of a full one
    assert (tmp_path / "one-reduced.json").exists()
    assert "| x | 1.00 | 1.02 |" in (tmp_path / "page.md").read_text()


def test_a_result_that_differs_is_exit_code_1(call: Callable[..., Result]) -> None:
    result = call(value=2.0)
    assert result.exit_code == 1
    assert "differs" in result.output


def test_missing_files_are_named_and_skipped(
    call: Callable[..., Result], frame: dict[str, ModuleType], tmp_path: Path
) -> None:
    needed = (frame["study"].NeededFile(path="mnist/train*", origin="the official files"),)
    result = call(value=2.0, files=needed)
    assert result.exit_code == 0
    assert f"one: skipped, it needs {tmp_path}/mnist/train* (the official files)" in result.stderr
    call("--only-page", files=needed)
    line = "- `one`, S: needs `mnist/train*` below `--data` (the official files)\n"
    assert line in (tmp_path / "page.md").read_text()
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images").touch()
    assert call(value=2.0, files=needed).exit_code == 1


@pytest.mark.parametrize(
    ("seeds", "measured", "shown"),
    [("3", "1.03", " --seeds 3"), ("4,9", "1.02", " --seeds 4,9"), ("1", "1.01", "")],
)
def test_seeds_are_a_number_or_a_list(
    call: Callable[..., Result], tmp_path: Path, seeds: str, measured: str, shown: str
) -> None:
    result = call("--seeds", seeds, "--write")
    assert measured in result.output
    assert f"`one --size reduced{shown}`," in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("seeds", ["0", "x", "1,,2", "-1"])
def test_other_seeds_are_refused(call: Callable[..., Result], seeds: str) -> None:
    result = call("--seeds", seeds)
    assert result.exit_code == 2
    assert "a list such as 3,7" in result.stderr


def test_an_unknown_study_is_named(call: Callable[..., Result]) -> None:
    result = call("two")
    assert result.exit_code == 2
    assert "no study two; there are one" in result.stderr


def test_the_page_shows_what_the_records_say(frame: dict[str, ModuleType]) -> None:
    """Run `python -m experiments.reproductions --only-page` after a change of a text."""
    records, studies = frame["records"], frame["study"].find_studies()
    page = records.PAGE.read_text()
    assert page == records.render_page(page, studies, records.read_records())
    assert {record.name for record in records.read_records()} <= set(studies)
    assert len(page.splitlines()) <= 90  # two screens
    reasonless = [
        record.name
        for record in records.read_records()
        if not studies[record.name].remark and any(r.verdict == "differs" for r in record.rows)
    ]
    assert not reasonless, "a study that differs says why in its remark"


def test_the_files_of_the_studies_are_valid(frame: dict[str, ModuleType], tmp_path: Path) -> None:
    from fedsim.comparison.load import load_comparison

    files: Path = frame["runs"].FILES
    compared = sorted(path.name for path in files.glob("*_compare.yaml"))
    bases = set()
    for name in compared:
        source = frame["runs"].comparison_of(name, [0], changes={})
        bases.add(Path(source["base"]).name)
        if "dataset: mnist" in (files / source["base"]).read_text() or "scatter" in name:
            changes = {"data.args.path": str(tmp_path)}  # the folder must be there
            source = frame["runs"].comparison_of(name, [0], changes=changes)
        assert len(load_comparison(source).variants) >= 2
    assert bases == {path.name for path in files.glob("*.yaml")} - set(compared)
    for path in files.glob("*.yaml"):
        assert f"experiments/reproductions/files/{path.name}" in path.read_text()


def test_sizes_are_changes_of_all_variants(frame: dict[str, ModuleType]) -> None:
    merged = frame["runs"]._merged
    changes = {"federation.rounds": 2, "privacy.noise_multiplier": 3}
    own = {"privacy": None, "local": {"steps": 1, "optimizer.lr": 2}}
    assert merged(own, changes) == {
        "privacy": None,
        "local.steps": 1,
        "local.optimizer.lr": 2,
        "federation.rounds": 2,
    }
    assert merged({}, changes) == changes

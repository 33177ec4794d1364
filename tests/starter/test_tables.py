"""`fedsim init --data` drafts an experiment that runs as it stands, and says what it read."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from fedsim.cli import cli
from fedsim.data import DataError
from fedsim.experiment import load_experiment
from fedsim.planning.validation import check_data
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.starter import StarterError
from fedsim.starter.tables import write_table_experiment

ROWS = 240


def table(folder: Path, *, mark: str = ",", decimal: str = ".", **columns: object) -> Path:
    """Write a table of patients; `columns` replaces or adds columns by functions of the row."""
    rng = random.Random(0)
    content = {
        "id": lambda n: f"P{n:04}",
        "site": lambda n: ("north", "south", "west")[n % 3],
        "age": lambda n: rng.randint(20, 90),
        "dose": lambda n: f"{rng.uniform(0, 5):.2f}".replace(".", decimal),
        "smoker": lambda n: rng.choice(["yes", "no", ""]),
        "ill": lambda n: rng.randint(0, 2),
        **columns,
    }
    rows = [list(content), *([str(cell(n)) for cell in content.values()] for n in range(ROWS))]
    path = folder / "patients.csv"
    path.write_text("".join(f"{mark.join(row)}\n" for row in rows), encoding="utf-8")
    return path


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def test_the_name_of_a_table_is_no_key_of_the_draft(tmp_path: Path) -> None:
    path = table(tmp_path).rename(tmp_path / "a\nprivacy: off  #.csv")
    experiment = load_experiment(write_table_experiment(tmp_path / "d", path).path).experiment
    assert experiment.privacy is not None


def test_the_draft_runs_as_it_stands_and_every_page_says_what_it_read(tmp_path: Path) -> None:
    experiment = write_table_experiment(tmp_path / "d", table(tmp_path)).path
    found = check_data(load_experiment(experiment))
    assert found.federation.data.client_names == ("north", "south", "west")
    assert [*(found.test_classes or ())] == ["0", "1", "2"]
    result = run_experiment(experiment, overrides=["federation.rounds=2"], out=tmp_path / "r")
    assert result.status == "completed"
    privacy = json.loads((tmp_path / "r" / "privacy.json").read_text())
    assert privacy["public_parts"]["constants"] == "from_rows"
    assert "were read from the rows, as the experiment declares" in privacy["statement"]
    assert result.privacy is not None
    assert "training alone: its constants came from the rows" in result.privacy.guarantee
    assert not verify_run(RunDirectory.open(tmp_path / "r"), pages=False).problems

    public = experiment.read_text().replace("    constants: from_rows", "    #")
    experiment.write_text(public)
    result = run_experiment(experiment, overrides=["federation.rounds=2"], out=tmp_path / "s")
    assert result.privacy is not None
    assert "rows" not in result.privacy.guarantee
    assert "from the rows" not in (tmp_path / "s" / "privacy.json").read_text()


def test_the_command_lists_each_column_with_its_decision(tmp_path: Path) -> None:
    shown = init(tmp_path / "d", "--data", table(tmp_path)).output
    for line in (
        "drafted from 240 rows",
        "target: ill (the last column, with few values)",
        "clients: site (by its name)",
        "  id      drop ",
        "  age     {range: [20, 100]} ",
        '  smoker  {classes: ["no", "yes", unknown], fill: unknown}  categories',
        "no ε covers",
        "fedsim validate experiment.yaml --data",
    ):
        assert line in shown
    text = (tmp_path / "d" / "experiment.yaml").read_text()
    assert "READ FROM THE ROWS" in text
    assert "# whole numbers; which range is known beforehand?" in text
    assert "# two classes: ill: {classes: {first: [0], others: [1, 2]}}" in text
    given = init(tmp_path / "e", "--data", tmp_path / "patients.csv", "--json").output
    assert json.loads(given)["columns"]["id"]["settings"] == "drop"


def test_spellings_that_differ_in_case_are_one_class(tmp_path: Path) -> None:
    data = table(
        tmp_path,
        smoker=lambda n: ("yes", "Yes", "NO", "", "Unknown")[n % 5],
        ill=lambda n: ("Yes", "yes", "No", "no")[n % 4],
    )
    experiment = write_table_experiment(tmp_path / "d", data).path
    columns = yaml.safe_load(experiment.read_text())["data"]["dataset"]["columns"]
    assert columns["smoker"] == {
        "classes": {"NO": ["NO"], "Unknown": ["Unknown", "unknown"], "Yes": ["Yes", "yes"]},
        "fill": "Unknown",
    }
    found = check_data(load_experiment(experiment))
    assert found.test_classes is not None
    assert [*found.test_classes] == ["No", "Yes"]


def test_the_grouping_in_the_comment_is_valid(tmp_path: Path) -> None:
    experiment = write_table_experiment(tmp_path / "d", table(tmp_path)).path
    for start in ("# two classes: ill: ", "# or by a cut: ill: "):
        line = next(one for one in experiment.read_text().splitlines() if start in one)
        setting = f"data.dataset.columns.ill={line.partition(start)[2]}"
        found = check_data(load_experiment(experiment, [setting]))
        assert len(found.test_classes or ()) == 2


@pytest.mark.parametrize(
    ("columns", "target", "reason"),
    [
        ({"diagnosis": lambda n: n % 2, "last": lambda n: n % 2}, "diagnosis", "by its name"),
        ({"Target": lambda n: n / 7}, "Target", "by its name"),
        ({"target": lambda n: f"T{n}"}, None, "name the column to predict: --target"),
        (
            {"y": lambda n: "" if n == 3 else n % 2},
            None,
            "'y', has 1 empty cell, and a target has none",
        ),
    ],
)
def test_the_target_is_found_by_a_rule(
    tmp_path: Path, columns: dict[str, Any], target: str | None, reason: str
) -> None:
    data = table(tmp_path, **columns)
    if target is None:
        with pytest.raises(StarterError) as caught:
            write_table_experiment(tmp_path / "d", data)
        assert reason in str(caught.value)
        assert not (tmp_path / "d").exists()
        return
    draft = write_table_experiment(tmp_path / "d", data)
    assert (draft.target, draft.target_reason) == (target, reason)
    check_data(load_experiment(draft.path))


def test_without_a_column_of_clients_rows_are_dealt(tmp_path: Path) -> None:
    rare = table(tmp_path, site=lambda n: "rare" if n < 5 else "usual")
    draft = write_table_experiment(tmp_path / "d", rare)
    assert draft.clients is None
    found = check_data(load_experiment(draft.path))
    assert found.federation.num_clients == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "il"}, "no column named 'il'; did you mean 'ill'"),
        ({"target": "id"}, "--target: column 'id' has text with many different values"),
        (
            {"target": "smoker"},
            "empty cells, and a target has none; remove these rows, or name another",
        ),
        ({"clients": "smoker"}, "--clients: column 'smoker' has"),
        ({"clients": "ill", "target": "ill"}, "is the target, and a client would hold one class"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(StarterError) as caught:
        write_table_experiment(tmp_path / "d", table(tmp_path), **options)
    assert message in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_tables_of_spreadsheets_are_recognised(tmp_path: Path) -> None:
    data = table(tmp_path, mark=";", decimal=",", town=lambda n: ("Köln", "Bonn")[n % 2])
    data.write_bytes(data.read_text(encoding="utf-8").encode("cp1252"))
    draft = write_table_experiment(tmp_path / "d", data, target="ill", clients="town")
    dataset = load_experiment(draft.path).experiment.data.dataset
    assert not isinstance(dataset, str)
    assert (dataset.decimal, dataset.encoding) == (",", "cp1252")
    found = check_data(load_experiment(draft.path))
    assert found.federation.data.client_names == ("Bonn", "Köln")


def test_a_regression_learns(tmp_path: Path) -> None:
    data = table(tmp_path, age=lambda n: n % 70, cost=lambda n: 500 + 3.5 * (n % 70))
    draft = write_table_experiment(tmp_path / "d", data, target="cost")
    result = run_experiment(draft.path, overrides=["privacy=null"], out=tmp_path / "r")
    assert result.metrics["test_r2"] > 0.5
    assert run_experiment(draft.path, overrides=["federation.rounds=2"], out=tmp_path / "p").privacy


def test_nothing_is_overwritten_and_other_files_are_refused(tmp_path: Path) -> None:
    data = table(tmp_path)
    for arguments, message in (
        ((tmp_path, "--data", data), "is not empty; name a new or empty directory"),
        ((tmp_path / "d", "--data", tmp_path / "x.csv"), "--data: no such file"),
        ((tmp_path / "d", "--data", tmp_path / "x.npz"), "must be a .csv or .parquet file"),
        ((tmp_path / "d", "--target", "ill"), "name columns of a table; add --data FILE"),
    ):
        done = init(*arguments)
        assert done.exit_code != 0
        assert message in done.output + str(done.exception)
    (tmp_path / "empty.csv").write_text("a,ill\n")
    with pytest.raises((StarterError, DataError), match="the table has no rows"):
        write_table_experiment(tmp_path / "d", tmp_path / "empty.csv")

"""A draft reads every table that it was made from, and a mistake comes with the line to paste."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from fedsim.data import DataError
from fedsim.data.files import read_files
from fedsim.data.settings import FileDataset
from fedsim.data.tables.draft import draft_column, draft_target, flow_text
from fedsim.data.tables.summary import ColumnSummary

N = 40
MANY = [str(7 * n % 101) for n in range(N)]


def summary_of(cells: Any) -> ColumnSummary:
    summary = ColumnSummary()
    summary.add(cells)
    return summary


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["", "NA", "?"] * 10, "drop"),
        (["x"] * N, "drop"),
        (["unknown", ""] * N, "drop"),
        ([f"P{n}" for n in range(N)], "drop"),
        ([str(n + 1000) for n in range(N)], "drop"),
        ([f"{n} days ago it hurt" for n in range(N)], "drop"),
        (["a" * 50, "b"] * N, "drop"),
        ([f"town {n % 25}" for n in range(100)], "drop"),
        (MANY, "{range: [0, 100]}"),
        ([f"{cell}.5" for cell in MANY], "{range: [0, 100]}"),
        ([*MANY, ""], "{range: [0, 100], fill: 50}"),
        ([*MANY, "-9"], "{range: [0, 100], fill: 50, missing: [-9]}"),
        ([*MANY, "not measured"], "{range: [0, 100], fill: 50, missing: [not measured]}"),
        (["5"] * N + ["100000"], "{range: [0, 100000], log: true}"),
        (["0", "1"] * N, "{range: [0, 1]}"),
        (["0", "1", ""] * N, "{classes: [0, 1, unknown], fill: unknown}"),
        (["3", "6", "7"] * N, "{classes: [3, 6, 7]}"),
        (["0.0", "1.0", "2.0"] * N, '{classes: ["0.0", "1.0", "2.0"]}'),
        (["TRUE", "FALSE"] * N, '{classes: ["FALSE", "TRUE"]}'),
        (["yes", "no", "maybe: #1"] * N, '{classes: ["maybe: #1", "no", "yes"]}'),
        (["st-t", "unknown", ""] * N, "{classes: [st-t, unknown], fill: unknown}"),
        (["2024-03-01", "2020-01-01"] * N, "{range: [2020, 2025], date: iso}"),
        (["31.12.2023", ""] * N, '{range: [2023, 2024], date: "%d.%m.%Y", fill: 2023.5}'),
    ],
)
def test_cells_become_settings(cells: list[str], expected: str) -> None:
    assert draft_column("a", summary_of(cells)).value == expected


def test_a_number_is_an_identifier_by_its_name_or_as_a_sequence() -> None:
    steps = [str(3 * n) for n in range(N)]
    assert draft_column("patient_id", summary_of(steps)).settings == "drop"
    assert draft_column("dose", summary_of(steps)).value == "{range: [0, 150]}"
    assert draft_column("lab_no", summary_of(steps)).settings == "drop"
    assert draft_column("lab_no", summary_of([*steps[:-1], "0"])).value == "{range: [0, 150]}"
    assert draft_column("patient_id", summary_of([*steps[:-1], "0"])).settings == "drop"
    assert draft_column("valid", summary_of(steps)).value == "{range: [0, 150]}"


def test_a_target_has_classes_or_is_a_regression() -> None:
    assert draft_target("y", summary_of(["0", "4", "1"] * 3)).value == "{classes: [0, 1, 4]}"
    assert draft_target("y", summary_of(["no", "yes"] * 3)).value == '{classes: ["no", "yes"]}'
    assert draft_target("y", summary_of(["0.5", "1.5"] * 3)).settings is None
    assert draft_target("y", summary_of(MANY)).settings is None


@pytest.mark.parametrize(
    "text", ["TRUE", "no", "1", "1.0", "a: b", "#x", "", "ä", "null", "a b", "it\x92s", "a\x85b"]
)
def test_text_stays_text_in_yaml(text: str) -> None:
    assert yaml.safe_load(f"{{{flow_text(text)}: [{flow_text(text)}]}}") == {text: [text]}


HEADER = "id,age,sex,chol,pain,fbs,ca,seen,ill"
ROWS = [
    f"P{n},{30 + n % 50},{'MF'[n % 2]},{'' if n % 7 == 0 else 180 + n},"
    f"{('typical angina', 'non-anginal', 'NA')[n % 3]},{('TRUE', 'FALSE', '')[n % 3]},"
    f"{('0.0', '1.0', '2.0', '')[n % 4]},{1 + n % 28:02}.03.2024,{n % 5}"
    for n in range(60)
]


def read(folder: Path, columns: dict[str, Any]) -> Any:
    path = folder / "h.csv"
    path.write_text("\n".join([HEADER, *ROWS]))
    return read_files(
        {"h": path}, FileDataset.model_validate({"target": "ill", "columns": columns})
    )


def test_all_mistakes_come_at_once_and_the_pasted_lines_end_them(tmp_path: Path) -> None:
    listed = {"sex": {"classes": ["M", "X"]}, "chol": {"range": [0, 600]}}
    with pytest.raises(DataError) as caught:
        read(tmp_path, listed)
    mistakes, _, pasted = str(caught.value).partition("lines to paste below data.dataset.columns")
    wrong = ["id", "sex", "chol", "pain", "fbs", "ca", "seen"]
    assert [line.split("'")[1] for line in mistakes.splitlines()] == wrong
    columns = yaml.safe_load("\n".join(pasted.splitlines()[1:]))
    assert list(columns) == wrong
    assert columns["sex"] == {"classes": ["M", "X", "F"]}  # what the file says stays, in its order
    assert columns["chol"] == {"range": [0, 600], "fill": 300}
    assert len(read(tmp_path, columns).train) == 60


def test_the_target_is_among_all_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, {"ill": {"classes": [0, 1, 2]}})
    assert "column 'ill': '3' is not one of the classes '0', '1', '2'" in str(caught.value)
    assert "column 'pain': 'typical angina' is not" in str(caught.value)
    assert "\n  ill: {classes: [0, 1, 2, 3, 4]}" in str(caught.value)


def test_another_decimal_mark_needs_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "h.csv"
    path.write_text("dose;ill\n3,5;0\n4,5;1\n")
    with pytest.raises(DataError, match=r"set data.dataset.decimal: ','$"):
        read_files({"h": path}, FileDataset(target="ill"))


def test_a_comment_says_nothing_about_the_rows() -> None:
    draft = draft_column("age", summary_of([str(n) for n in range(29, 78)] + [""]))
    assert draft.line == "age: {range: [20, 80], fill: 50}"
    assert not any(character.isdigit() for character in draft.comment)


def test_typed_cells_of_parquet_are_drafted_as_they_are_read(tmp_path: Path) -> None:
    typed = {
        "flag": [True, False] * N,
        "gaps": [True, None] * N,
        "code": pa.array([1, 2, 3, 1] * (N // 2), pa.int8()),
        "age": [30.5 + n for n in range(2 * N - 1)] + [None],
        "dose": [2.5 * n for n in range(2 * N - 1)] + [float("inf")],
        "day": pa.array(["2024-01-01", None] * N).cast(pa.date32()),
        "ill": [False, True] * N,
    }
    path = tmp_path / "h.parquet"
    parquet.write_table(pa.table(typed), path)
    with pytest.raises(DataError, match="lines to paste") as caught:
        read_files({"h": path}, FileDataset(target="ill"))
    columns = yaml.safe_load("\n".join(str(caught.value).partition("from_rows")[2].splitlines()))
    assert columns == {
        "gaps": {"classes": ["true", "unknown"], "fill": "unknown"},
        "dose": {"range": [0, 200], "fill": 100, "missing": ["inf"]},
        "age": {"range": [20, 120], "fill": 70},
        "day": {"date": "iso", "range": [2024, 2025], "fill": 2024.5},
    }
    dataset = FileDataset.model_validate({"target": "ill", "columns": columns})
    assert read_files({"h": path}, dataset).train.features.max() <= 3

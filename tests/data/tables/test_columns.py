"""Columns of a table become features by the constants of the file, and by nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedsim.data import DataError
from fedsim.data.files import read_files
from fedsim.data.settings import FileDataset


def read(folder: Path, text: str, test: str | None = None, **settings: Any):
    path, public = folder / "h.csv", folder / "public.csv"
    path.write_text(text, encoding=settings.get("encoding", "utf-8"))
    if test is not None:
        public.write_text(test)
    dataset = FileDataset.model_validate({"target": "ill", **settings})
    return read_files({"h": path}, dataset, test=None if test is None else public)


def features(folder: Path, cells: list[str], constants: Any) -> list[list[float]]:
    text = "a,ill\n" + "".join(f'"{cell}",0\n' for cell in cells)
    return read(folder, text, columns={"a": constants}).train.features.tolist()


@pytest.mark.parametrize(
    ("cells", "constants", "expected"),
    [
        (["0", "25", "120", "-3"], {"range": [0, 100]}, [[0], [0.25], [1], [0]]),
        (["F", "M"], {"classes": ["F", "M"]}, [[1, 0], [0, 1]]),
        (
            ["F", "", "x"],
            {"classes": ["F", "M"], "fill": "M", "other": "F"},
            [[1, 0], [0, 1], [1, 0]],
        ),
        (["1", "2"], {"classes": [2, 1]}, [[0, 1], [1, 0]]),
        (
            ["0", "3", "", "9"],
            {"classes": {"none": [0], "some": [1, 3]}, "fill": "none", "other": "some"},
            [[1, 0], [0, 1], [1, 0], [0, 1]],
        ),
        (["0", "0.5", "-1", ""], {"above": 0, "fill": 7}, [[1, 0], [0, 1], [1, 0], [0, 1]]),
        (["true", "false"], {"classes": [False, True]}, [[0, 1], [1, 0]]),
        (["none", "None"], {"classes": ["none", "x"], "fill": "x"}, [[1, 0], [0, 1]]),
        (
            ["", "NA", "?", "7", "-9", "-9.0"],
            {"fill": 1, "missing": [-9]},
            [[1], [1], [1], [7], [1], [1]],
        ),
        (["-3.4028235e+38", "2"], {"fill": 1, "missing": [-3.4028235e38]}, [[1], [2]]),
        (["0", "9", "-9"], {"log": True, "range": [-9, 9]}, [[0.5], [1], [0]]),
        (["", "9"], {"fill": 9, "range": [0, 10]}, [[0.9], [0.9]]),
        (
            ["2024-07-02", "2020-01-01T00:00:00"],
            {"date": "iso", "range": [2020, 2030]},
            [[0.45], [0]],
        ),
        (["31.12.2023", "01.01.2024"], {"date": "%d.%m.%Y"}, [[2023 + 364 / 365], [2024]]),
    ],
)
def test_cells_become_features(
    cells: list[str], constants: Any, expected: list[list[float]], tmp_path: Path
) -> None:
    assert features(tmp_path, cells, constants) == pytest.approx(np.array(expected), abs=1e-4)


def test_a_row_never_depends_on_another_one(tmp_path: Path) -> None:
    constants = {"fill": 3, "log": True, "range": [0, 50]}
    alone = features(tmp_path, ["7"], constants)
    assert features(tmp_path, ["7", "1000000", ""], constants)[:1] == alone


def test_spreadsheets_of_germany_are_read(tmp_path: Path) -> None:
    text = '\ufeffid;wert;ill\r\nA;"3,5";1\r\nB;-0,25;0\r\n;;\r\n'
    data = read(tmp_path, text, decimal=",", columns={"id": "drop"})
    assert data.train.features.tolist() == [[3.5], [-0.25]]
    assert data.columns == ("wert",)
    assert read(tmp_path, "\ufeffwert;ill\n3;1\n", encoding="utf_8").columns == ("wert",)
    assert read(tmp_path, '"wert";"ill"\n"3,5";"1"\n', decimal=",").columns == ("wert",)
    text = "größe;ill\n1,5;krank\n2;gesund\n"
    data = read(tmp_path, text, decimal=",", encoding="cp1252")
    assert data.class_names == ("gesund", "krank")


def test_the_target_may_list_its_classes(tmp_path: Path) -> None:
    data = read(tmp_path, "a,ill\n1,yes\n2,no\n", columns={"ill": {"classes": ["no", "yes"]}})
    assert data.train.targets.tolist() == [1, 0]
    assert data.class_names == ("no", "yes")
    with pytest.raises(DataError, match="3: column 'ill': 'ny' is not one of the classes"):
        read(tmp_path, "a,ill\n1,yes\n2,ny\n", columns={"ill": {"classes": ["no", "yes"]}})


def test_the_target_may_group_its_classes_or_cut_its_numbers(tmp_path: Path) -> None:
    text = "a,ill\n1,0\n2,4\n3,1\n"
    groups = {"ill": {"classes": {"healthy": [0], "sick": [1, 2, 3, 4]}}}
    data = read(tmp_path, text, columns=groups)
    assert data.train.targets.tolist() == [0, 1, 1]
    assert data.class_names == ("healthy", "sick")
    data = read(tmp_path, text, columns={"ill": {"above": 1}})
    assert data.train.targets.tolist() == [0, 1, 0]
    assert data.class_names == ("up to 1", "above 1")
    with pytest.raises(DataError) as caught:
        read(tmp_path, "a,ill\n1,0\n2,5\n", columns=groups)
    assert str(caught.value) == (  # no `other` and no `fill`, which a target does not have
        f"{tmp_path / 'h.csv'}:3: column 'ill': '5' is not one of the classes '0', '1', '2', '3', "
        "'4'; add it to classes"
    )
    with pytest.raises(DataError, match=r"is empty; fix the cell or remove the row$"):
        read(tmp_path, "a,ill\n1,0\n2,\n", columns={"ill": {"above": 1}})


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"classes": {"a": 0, "b": [1]}}, "lists of cells by the name of a class"),
        ({"classes": {"a": [0], "b": []}}, "lists of cells by the name of a class"),
        ({"classes": {"a": [0, 1]}}, "at least 2 classes, got 1"),
        ({"classes": {"a": [0, 1], "b": [1]}}, "classes has '1' twice"),
        ({"classes": {"a": [0], "b": [1]}, "above": 0}, "classes and above exclude each other"),
        ({"classes": {"a": [0], "b": [1]}, "fill": 1}, "fill must be one of classes, got '1'"),
        ({"above": 0, "range": [0, 1]}, "above and range exclude each other"),
        ({"above": 0, "other": "x"}, "other is one of classes"),
    ],
)
def test_groups_and_cuts_that_contradict_are_refused(constants: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileDataset.model_validate({"target": "ill", "columns": {"a": constants}})


def test_a_public_table_is_the_test_set_in_any_order_of_columns(tmp_path: Path) -> None:
    data = read(tmp_path, "a,b,ill\n1,2,x\n3,4,y\n", "ill,b,a\ny,20,10\n")
    assert data.test is not None
    assert data.test.features.tolist() == [[10, 20]]
    assert data.test.targets.tolist() == [1]
    assert len(data.train) == 2


def test_parquet_has_types(tmp_path: Path) -> None:
    path = tmp_path / "h.parquet"
    table = pa.table(
        {
            "age": [50, None, 100],
            "sex": ["F", "M", None],
            "day": pa.array(["2024-01-01", "2025-01-01", "2024-07-02"]).cast(pa.date32()),
            "grade": pa.array([1, 2, 1]),
            "ill": [True, False, True],
            "smoker": [True, None, False],
        }
    )
    parquet.write_table(table, path)
    columns = {
        "age": {"fill": 0, "range": [0, 100]},
        "sex": {"classes": ["F", "M"], "fill": "F"},
        "day": {"date": "iso"},
        "grade": {"classes": [1, 2]},
        "smoker": {"classes": [False, True], "fill": False},
    }
    dataset = FileDataset.model_validate({"target": "ill", "columns": columns})
    data = read_files({"h": path}, dataset).train
    assert data.features.round(2).tolist() == [
        [0.5, 1, 0, 2024, 1, 0, 0, 1],
        [0, 0, 1, 2025, 0, 1, 1, 0],
        [1, 1, 0, 2024.5, 1, 0, 1, 0],
    ]
    assert data.targets.tolist() == [1, 0, 1]


NUMBER = "is not a finite number"
FIX = "fix the cell or remove the row"
OR_SET = f"{FIX}, or set data.dataset.columns:"
SEX = {"columns": {"sex": {"classes": ["F", "M"]}}}
DAY = {"columns": {"day": {"date": "iso"}}}
PASTE = (
    "\nlines to paste below data.dataset.columns; their constants come from the rows, which no ε "
    "covers: put public ones, or set data.dataset.constants: from_rows\n  "
)
TEN_BAD_TABLES = [  # content, settings, message with the line to paste
    (
        "age,ill\n5,0\n,1\n",
        {},
        f":3: column 'age': the cell is empty; {OR_SET} {{age: {{fill: 0}}}}{PASTE}"
        "age: {classes: [5, unknown], fill: unknown}  # a few whole numbers; codes or amounts? "
        "amounts: {range: [5, 6]}",
    ),
    (
        "age,ill\n5,0\n60,1\nNA,1\n",
        {},
        f":4: column 'age': 'NA' {NUMBER}; {OR_SET} {{age: {{fill: 0}}}}{PASTE}"
        "age: {classes: [5, 60, unknown], fill: unknown}  # a few whole numbers; codes or amounts? "
        "amounts: {range: [5, 60]}",
    ),
    (
        "sex,ill\nF,0\nM,0\n",
        {},
        f":2: column 'sex': 'F' {NUMBER}; {OR_SET} {{sex: {{classes: [...]}}}}, or sex: drop{PASTE}"
        "sex: {classes: [F, M]}  # categories; which ones does its code book have?",
    ),
    (
        "sex,ill\nF,0\nm,1\n",
        SEX,
        ":3: column 'sex': 'm' is not one of the classes 'F', 'M'; add it to classes, or set "
        f"other: M{PASTE}sex: {{classes: [F, M, m]}}  # categories; which ones does its code book "
        "have?",
    ),
    (
        "day,ill\n31.12.2024,0\n01.02.2020,0\n",
        {},
        f":2: column 'day': '31.12.2024' {NUMBER}; {OR_SET} {{day: {{date: iso}}}}, or a format "
        f"as %d.%m.%Y{PASTE}"
        'day: {range: [2020, 2025], date: "%d.%m.%Y"}  # dates; which years are possible?',
    ),
    (
        "day,ill\n12/31/2024,0\n01/31/2024,0\n",
        DAY,
        f":2: column 'day': '12/31/2024' is not an ISO date such as 2024-03-31; {FIX}, or change "
        f"date{PASTE}"
        'day: {range: [2024, 2025], date: "%m/%d/%Y"}  # dates; which years are possible? day or '
        "month first?",
    ),
    (
        'dose,ill\n"3,5",0\n',
        {},
        f":2: column 'dose': '3,5' {NUMBER} with the decimal mark '.'; set data.dataset.decimal: "
        "','",
    ),
    (
        "age,ill\n5,0\n",
        {"columns": {"agee": {"fill": 0}}},
        "data.dataset.columns: PATH: no column named 'agee'; did you mean 'age'?",
    ),
    ("age,dead\n5,0\n", {}, ": no column named 'ill'; known: 'age', 'dead'"),
    (
        "id,ill\nA,0\n",
        {"columns": {"id": "drop"}},
        ": no column beside the target 'ill' that is a feature; add a feature",
    ),
]


@pytest.mark.parametrize(("text", "settings", "message"), TEN_BAD_TABLES)
def test_ten_bad_tables(text: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = str(tmp_path / "h.csv")
    expected = message.replace("PATH", path) if "PATH" in message else path + message
    with pytest.raises(DataError) as caught:
        read(tmp_path, text, **settings)
    assert str(caught.value) == expected


def test_another_table_needs_the_same_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"public.csv: no column named 'b'.* has it"):
        read(tmp_path, "a,b,ill\n1,2,0\n", "a,ill\n1,0\n")
    with pytest.raises(DataError, match=r"public.csv: column 'c' is not in .*: \{c: drop\}"):
        read(tmp_path, "a,ill\n1,0\n", "a,c,ill\n1,2,0\n")
    assert read(tmp_path, "a,ill\n1,0\n", "a,c,ill\n1,2,0\n", columns={"c": "drop"}).test


def test_another_encoding_says_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "h.csv"
    path.write_bytes("größe,ill\n1,0\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"cannot be read as UTF-8 .*set data.dataset.encoding"):
        read_files({"h": path}, FileDataset(target="ill"))


def test_a_format_that_is_no_pattern_fits_no_cell(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'01\.02' is not a date as %d%d"):
        features(tmp_path, ["01.02"], {"date": "%d%d"})

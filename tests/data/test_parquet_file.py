from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedsim.data.examples import DataError
from fedsim.data.tables import table as parquet_file


def table(folder: Path, **columns: Any) -> Path:
    path = folder / "table.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


def test_columns_become_features_and_text_becomes_classes(read_file: Any, tmp_path: Path) -> None:
    path = table(tmp_path, a=[1, -3, 2], kind=["red", "blue", "red"], b=[2.5, 1e2, 0.0])
    train = read_file(path, "kind").train
    assert train.features.dtype == np.float32
    assert train.features.tolist() == [[1, 2.5], [-3, 100], [2, 0]]
    assert train.targets.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        (pa.array([3, 0, 1], pa.int32()), np.int64),
        (pa.array([3.0, 0.0, 1.0]), np.float32),
        (pa.array([True, False, True]), np.int64),
        (pa.array(["b", "a", "b"]).dictionary_encode(), np.int64),
    ],
)
def test_the_type_of_the_target_decides(
    read_file: Any, targets: Any, dtype: type, tmp_path: Path
) -> None:
    path = table(tmp_path, a=pa.array([True, False, True]), y=targets)
    train = read_file(path, "y").train
    assert train.targets.dtype == dtype
    assert train.features.tolist() == [[1], [0], [1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1.0, None], "y": [0, 1]}, "row 2: column 'a': the cell is empty"),
        ({"a": [1.0, 2.0], "y": [None, 1]}, "row 1: column 'y': the cell is empty"),
        ({"a": [1.0, 2.0], "y": [None, True]}, "row 1: column 'y': the cell is empty"),
        ({"a": [1.0, float("nan")], "y": [0, 1]}, "row 2: column 'a': the cell is empty"),
        ({"a": [1e300, 1.0], "y": [0, 1]}, "row 1: column 'a': 1e[+]300 is not a finite number"),
        ({"a": ["x", "y"], "y": [0, 1]}, "row 1: column 'a': 'x' is not a finite number"),
        (
            {"a": [[1], [2, 3]], "y": [0, 1]},
            "column 'a' must be numbers, text, truth",
        ),
        ({"a": [1], "label": [0]}, "no column named 'y'; known: 'a', 'label'"),
        ({"y": [1]}, "no column beside the target 'y'; add a feature"),
        ({"a": pa.array([], pa.int64()), "y": pa.array([], pa.int64())}, "the table has no rows"),
    ],
)
def test_unfit_tables_are_refused(
    read_file: Any, columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = table(tmp_path, **columns)
    with pytest.raises(DataError, match=message) as caught:
        read_file(path, "y")
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value).partition("\nlines to paste")[0]


def test_tokens_stay_whole(read_file: Any, tmp_path: Path) -> None:
    large = 2**24 + 1  # which float32 cannot hold
    path = table(tmp_path, a=[1, large], b=pa.array([2, 0], pa.uint8()), y=[0, 1])
    features = read_file(path, "y", tokens=True).train.features
    assert features.dtype == np.int64
    assert features.tolist() == [[1, 2], [large, 0]]


def test_columns_of_one_name_are_refused(read_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    arrays = [pa.array([1]), pa.array([2]), pa.array([0])]
    parquet.write_table(pa.Table.from_arrays(arrays, names=["a", "a", "y"]), path)
    with pytest.raises(DataError, match="two columns are named 'a'"):
        read_file(path, "y")


def test_what_is_no_parquet_is_refused(read_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    path.write_text("a,y\n1,0\n")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_file(path, "y")


def test_without_pyarrow_it_says_what_to_install(
    read_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path, a=[1], y=[0])
    monkeypatch.setattr(parquet_file, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'fedsim-dp\[parquet\]'"):
        read_file(path, "y")

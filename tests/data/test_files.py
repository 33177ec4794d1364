from pathlib import Path

import numpy as np
import pytest

from fedsim.data import DataError

X = np.arange(6.0).reshape(3, 2)
Y = np.array([0, 1, 0])


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def npz_file(folder: Path, **arrays) -> Path:
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("name", ["x", "features", "pixels"])
def test_npz_with_one_other_array(read_file, name, tmp_path):
    dataset = read_file(npz_file(tmp_path, label=Y, **{name: X}), "label")
    assert dataset.train.features.tolist() == X.tolist()
    assert dataset.train.targets.tolist() == Y.tolist()
    assert dataset.test is None


def test_npz_takes_the_named_features_of_several(read_file, tmp_path):
    path = npz_file(tmp_path, y=Y, x=X, ids=np.arange(3))
    assert read_file(path, "y").train.input_shape == (2,)


def test_npz_with_its_own_test_set(read_file, tmp_path):
    dataset = read_file(npz_file(tmp_path, y=Y, x=X, x_test=X[:1], y_test=Y[:1]), "y")
    assert dataset.test is not None
    assert len(dataset.test) == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "label": Y}, "no array named 'y'; known: 'label', 'x'"),
        ({"x": X, "yy": Y}, "did you mean 'yy'"),
        ({"y": Y}, "no other array"),
        ({"y": Y, "a": X, "b": X}, "be named x or features; got 'a', 'b'"),
        ({"y": Y, "x": X, "features": X}, "be named x or features"),
        ({"y": Y, "x": X, "x_test": X}, "needs both of 'x_test', 'y_test'"),
        ({"y": Y, "x": X.astype(object)}, "without pickle"),
    ],
)
def test_unfit_npz_is_refused(read_file, arrays, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        read_file(npz_file(tmp_path, **arrays), "y")
    assert str(caught.value).startswith(str(tmp_path / "data.npz"))


def test_what_is_no_archive_is_refused(read_file, tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"not an \.npz archive"):
        read_file(path, "y")


def test_csv_features_and_text_classes(read_file, tmp_path):
    text = "\ufeffa,kind,b\n1, red ,2.5\n\n-3,blue,1e2\n"
    train = read_file(csv_file(tmp_path, text), "kind").train
    assert train.features.tolist() == [[1, 2.5], [-3, 100]]
    assert train.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        (["3", "0", "1"], np.int64),
        (["3", "0.0", "1"], np.float32),
        (["-1", "0", "1"], np.float32),
        (["1e3", "0", "1"], np.float32),
    ],
)
def test_csv_number_targets(read_file, cells, dtype, tmp_path):
    text = "a,y\n" + "".join(f"0,{cell}\n" for cell in cells)
    targets = read_file(csv_file(tmp_path, text), "y").train.targets
    assert targets.dtype == dtype
    assert targets.tolist() == [float(cell) for cell in cells]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,y\n1,0\n,1\n", ":3: column 'a': the cell is empty"),
        ("a,y\n1,0\n\n2,\n", ":4: column 'y': the cell is empty"),
        ("a,y\nNA,0\n", ":2: column 'a': 'NA' is not a finite number"),
        ("a,y\nnan,0\n", "'nan' is not a finite number"),
        ("a,y\n1_0,0\n", "'1_0' is not a finite number"),
        ("a,y\n1,0.5\n1,NA\n", ":3: column 'y': 'NA' is not a finite number but other"),
        ("a,y\n1,x\n1,NA\n", ":3: column 'y': 'NA' is a missing value; fix the cell or remove the"),
        ("a,y\n1,0,2\n", ":2: a row must have 2 cells as the header has, got 3"),
        ("a,label\n1,0\n", "no column named 'y'; known: 'a', 'label'"),
        ("a,a,y\n1,1,0\n", ":1: two columns are named 'a'; rename or remove one"),
        (",a,y\n0,1,0\n", ":1: column 1 has no name"),
        ("y\n1\n", "no column beside the target 'y'; add a feature"),
        ("a,y\n", "the table has no rows"),
        ("", "is empty"),
        ('a,y\n"1,0\n', "cannot be read"),
        ("a,y\n1e300,0\n", "'1e300' is not a finite number"),
    ],
)
def test_unfit_csv_is_refused(read_file, text, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        read_file(csv_file(tmp_path, text), "y")
    assert str(caught.value).startswith(str(tmp_path / "table.csv"))
    assert "\n" not in str(caught.value).partition("\nlines to paste")[0]


def test_missing_and_unknown_files(read_file, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_file(tmp_path / "absent.csv", "y")
    with pytest.raises(DataError, match=r"must be a \.npz, \.csv or \.parquet file"):
        read_file(tmp_path / "table.xlsx", "y")

import numpy as np
import pytest
from sklearn import datasets

from fedsim.data.builtin.scikit import TABLES, load_table
from fedsim.data.catalog import TableArgs


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_scikit_learns(name: str) -> None:
    options = {"scaled": False} if name == "diabetes" else {}
    wanted = getattr(datasets, f"load_{name}")(**options)
    raw = load_table(name, TableArgs(scaled=False)).train
    assert np.array_equal(raw.features, wanted.data.astype(np.float32))
    assert np.array_equal(raw.targets, wanted.target.astype(raw.targets.dtype))


@pytest.mark.parametrize("name", TABLES)
def test_published_ranges_bring_tables_to_0_1(name: str) -> None:
    data = load_table(name, TableArgs())
    columns = [data.train.features]
    if data.class_names is None:
        columns.append(data.train.targets.reshape(len(data.train), -1))
    for values in columns:  # published ranges are rounded
        assert np.allclose(values.min(axis=0), 0, atol=0.02)
        assert np.allclose(values.max(axis=0), 1, atol=0.02)


def test_classes_keep_their_names() -> None:
    assert load_table("iris", TableArgs()).class_names == ("setosa", "versicolor", "virginica")
    assert load_table("breast_cancer", TableArgs()).class_names == ("malignant", "benign")
    assert load_table("diabetes", TableArgs()).train.targets.shape == (442,)
    assert load_table("linnerud", TableArgs()).train.targets.shape == (20, 3)

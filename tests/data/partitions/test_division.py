"""Clients by column, file, function and partitioner of flwr-datasets."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedsim.data import DataError, FederatedData, load_federated_data
from fedsim.data.file_names import matching_files
from fedsim.data.partitions.given import Assignment
from fedsim.data.settings import DataSettings

ROWS = [f"{age},{'Bonn' if age % 3 else 'Köln'},{age % 2}" for age in range(30)]
PLUGIN = """
import numpy as np

def halves(x, y, seed):
    return (x[:, 0] >= 15).astype(int)

def names(x, y, seed, num_clients):
    return np.where(np.arange(len(x)) % num_clients, "b", "a")

def mapping(x, y, seed, rest=True):
    return {"a": np.arange(5), "b": np.arange(5, len(x) if rest else 10)}

def rows_of_clients(x, y, seed):
    return np.array_split(np.arange(len(x)), [7])

def twice(x, y, seed):
    return {0: [0, 1], 1: [1]}

def gaps(x, y, seed):
    return {0: [0, 1], "a": [3]}

def nowhere(x, y, seed):
    return y * 0 - 1

def short(x, y, seed):
    return [0, 1]

def broken(x, y, seed):
    return x[99999]
"""


def load(folder: Path, partition: dict[str, Any], **data: Any) -> FederatedData:
    (folder / "h.csv").write_text("age,town,ill\n" + "\n".join(ROWS) + "\n", encoding="utf-8")
    (folder / "p.py").write_text(PLUGIN)
    dataset = {"path": "h.csv", "target": "ill", "columns": {"town": "drop"}}
    raw = {"dataset": dataset, "partition": partition, "test_fraction": 0.2} | data
    return load_federated_data(DataSettings.model_validate(raw), seed=0, base=folder)


def ages(data: FederatedData) -> list[list[int]]:
    return [sorted(client.features[:, 0].astype(int).tolist()) for client in data.clients]


def on_one_client(data: FederatedData) -> bool:
    """Return whether every example is on one client or in the test set."""
    found = np.concatenate([*ages(data), data.test.features[:, 0].astype(int)])
    return sorted(found.tolist()) == list(range(30))


def town(**more: Any) -> dict[str, Any]:
    return {"dataset": {"path": "h.csv", "target": "ill", "columns": more}}


def test_a_client_for_each_value_of_a_column(tmp_path: Path) -> None:
    data = load(tmp_path, {"scheme": "column", "column": "town"}, **town())
    assert data.client_names == ("Bonn", "Köln")
    assert data.columns == ("age",)
    bonn, koeln = ages(data)
    assert all(age % 3 for age in bonn)
    assert not any(age % 3 for age in koeln)
    assert on_one_client(data)


def test_values_that_are_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    partition = {"scheme": "column", "column": "age", "min_examples": 0}
    data = load(tmp_path, partition, **town(town={"classes": ["Bonn", "Köln"]}))
    assert data.client_names is not None
    assert [int(name) for name in data.client_names] == list(range(30))
    assert Assignment.by_name(["--3", "2"]).names == ("--3", "2")


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"column": "towm"}, r"no column named 'towm'; did you mean 'town'\?"),
        (
            {"column": "town", "num_clients": 3},
            r"num_clients is 3, .* gives 2 clients \('Bonn', 'Köln'\)",
        ),
        (
            {"column": "town", "min_examples": 11},
            r"client 'Köln' has \d+ training examples, fewer than",
        ),
    ],
)
def test_columns_that_do_not_divide(
    partition: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, {"scheme": "column", **partition}, **town())


def test_a_row_without_a_client_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gap.csv").write_text("age,town,ill\n1,Bonn,0\n2,,1\n")
    dataset = {"path": "gap.csv", "target": "ill"}
    with pytest.raises(DataError, match=r"gap.csv:3: column 'town': the cell is empty, and names"):
        load(tmp_path, {"scheme": "column", "column": "town"}, dataset=dataset)
    typed = pa.table({"age": [1, 2], "town": [7, None], "ill": [0, 1]})
    parquet.write_table(typed, tmp_path / "gap.parquet")
    dataset = {"path": "gap.parquet", "target": "ill"}
    with pytest.raises(DataError, match=r"gap.parquet: row 2: column 'town': the cell is empty"):
        load(tmp_path, {"scheme": "column", "column": "town"}, dataset=dataset)


def test_a_time_names_a_client_in_every_unit(tmp_path: Path) -> None:
    days = pa.array([0, 86_400_000_000_000], pa.timestamp("ns"))
    parquet.write_table(
        pa.table({"age": [1, 2], "day": days, "ill": [0, 1]}), tmp_path / "t.parquet"
    )
    partition = {"scheme": "column", "column": "day", "min_examples": 0}
    data = load(tmp_path, partition, dataset={"path": "t.parquet", "target": "ill"})
    assert data.client_names == ("1970-01-01 00:00:00", "1970-01-02 00:00:00")


def hospitals(folder: Path) -> None:
    (folder / "data").mkdir()
    for name, text in (
        ("b", "age,ill\n1,0\n2,1\n"),
        ("a", "ill,age\n0,3\n1,4\n0,5\n"),
    ):
        (folder / "data" / f"{name}.csv").write_text(text)
    (folder / "public.csv").write_text("age,ill\n7,1\n8,0\n")


def test_a_client_for_each_file_and_a_public_test_table(tmp_path: Path) -> None:
    hospitals(tmp_path)
    dataset = {"target": "ill", "test": "public.csv"}
    partition = {"scheme": "files", "pattern": "data/*.csv"}
    data = load(tmp_path, partition, dataset=dataset, test_fraction=None)
    assert data.client_names == ("a", "b")
    assert ages(data) == [[3, 4, 5], [1, 2]]
    assert data.test.features.tolist() == [[7], [8]]  # no row of a client


def test_files_of_one_name_are_named_by_folder(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text("age,ill\n1,0\n2,1\n")
    partition = {"scheme": "files", "pattern": "*/train.csv", "min_examples": 0}
    data = load(tmp_path, partition, dataset={"target": "ill"}, test_fraction=0.5)
    assert data.client_names == ("x/train", "y/train")
    (tmp_path / "x" / "train.parquet").touch()
    assert list(matching_files("x/*", tmp_path)) == ["train.csv", "train.parquet"]


def test_a_function_says_the_client_of_each_example(tmp_path: Path) -> None:
    halves = load(tmp_path, {"scheme": "./p.py:halves"})
    low, high = ages(halves)
    assert max(low) < 15 <= min(high)
    assert on_one_client(halves)
    data = load(tmp_path, {"scheme": "./p.py:names", "num_clients": 2})
    assert data.client_names == ("a", "b")
    assert load(tmp_path, {"scheme": "./p.py:mapping"}).clients.sizes == [5, 19]
    assert load(tmp_path, {"scheme": "./p.py:rows_of_clients"}).clients.sizes == [7, 17]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"scheme": "./p.py:gaps"}, "row 2 is on no client; give every row a client"),
        ({"scheme": "./p.py:nowhere"}, "every training example is on no client"),
        ({"scheme": "./p.py:twice"}, "row 1 is on the clients 0 and 1"),
        ({"scheme": "./p.py:short"}, r"must return the client of each example .* got shape \(2,\)"),
        (
            {"scheme": "./p.py:broken"},
            r"'./p.py:broken': failed.*it is called with features, targets",
        ),
        ({"scheme": "./p.py:mapping", "args": {"rest": False}}, "row 10 is on no client"),
        ({"scheme": "./p.py:halvs"}, r"has no 'halvs'; did you mean halves\?"),
        (
            {"scheme": "./p.py:halves", "num_clients": 5, "min_examples": 1},
            "client 2 .*min_examples",
        ),
    ],
)
def test_functions_that_do_not_divide(
    partition: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, partition)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # imports Hugging Face datasets
def test_partitioners_of_flwr_datasets_by_their_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = {"alpha": 1.0, "partition_by": "label", "min_partition_size": 1}
    dirichlet = {"scheme": "DirichletPartitioner", "num_clients": 3, "args": args}
    first, again = (load(tmp_path, dirichlet) for _ in range(2))
    assert ages(first) == ages(again)
    assert sum(first.clients.sizes) + len(first.test) == 30
    natural = {"scheme": "NaturalIdPartitioner", "args": {"partition_by": "town"}}
    data = load(tmp_path, natural, **town())
    assert set(data.client_names or ()) == {"Bonn", "Köln"}
    assert data.columns == ("age",)
    assert capfd.readouterr().err == ""
    for scheme, message in (
        ({"args": {"alpa": 1}}, "has no 'alpa'; did you mean 'alpha'"),
        ({"args": {"alpha": 1.0}, "num_clients": 3}, "needs partition_by"),
        ({"args": {**args, "alpha": -1.0}, "num_clients": 3}, "DirichletPartitioner of flwr"),
    ):
        with pytest.raises(DataError, match=message):
            load(tmp_path, {"scheme": "DirichletPartitioner", **scheme})


def test_an_archive_may_name_the_client_of_each_example(tmp_path: Path) -> None:
    arrays = {"x": np.arange(30.0).reshape(30, 1), "y": np.arange(30) % 2}
    np.savez(tmp_path / "d.npz", **arrays, site=np.arange(30) % 3, wrong=np.arange(4))
    dataset = {"path": "d.npz", "target": "y"}
    data = load(tmp_path, {"scheme": "column", "column": "site"}, dataset=dataset)
    assert data.client_names == ("0", "1", "2")
    assert all({age % 3 for age in own} == {client} for client, own in enumerate(ages(data)))
    with pytest.raises(DataError, match=r"no array named 'sites'; did you mean 'site'\?"):
        load(tmp_path, {"scheme": "column", "column": "sites"}, dataset=dataset)
    with pytest.raises(DataError, match=r"array 'wrong' names the client of each of 30 training"):
        load(tmp_path, {"scheme": "column", "column": "wrong"}, dataset=dataset)
    sites = np.array([b"north", b"south"] * 15)
    np.savez(tmp_path / "d.npz", **arrays, site=sites, gap=np.where(arrays["y"] > 0, sites, b""))
    data = load(tmp_path, {"scheme": "column", "column": "site"}, dataset=dataset)
    assert data.client_names == ("north", "south")
    with pytest.raises(DataError, match=r"array 'gap' names .* text that is not empty"):
        load(tmp_path, {"scheme": "column", "column": "gap"}, dataset=dataset)

"""Datasets in the forms of Hugging Face, from a folder on disk."""

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedsim.data import DataError, load_federated_data
from fedsim.data.builtin import hugging_face
from fedsim.data.builtin.hugging_face import load_hugging_face
from fedsim.data.catalog import HuggingFaceArgs
from fedsim.data.examples import Dataset
from fedsim.data.settings import DataSettings, LoadContext

# Its import takes a second, which only the process pays that runs these tests.
pytestmark = pytest.mark.skipif(find_spec("flwr_datasets") is None, reason="needs flwr-datasets")

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a train and a test split, as the hub stores them."""
    import datasets
    from PIL import Image

    home = tmp_path_factory.mktemp("hub")
    columns = {
        "image": [Image.fromarray(one) for one in PIXELS],
        "label": [0, 1, 0, 1, 0, 1],
        "writer": list("ccaabb"),
        "age": [1, 2, 3, 4, 5, 6],
        "height": [0.5] * 6,
        "note": ["x"] * 6,
    }
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["cat", "dog"]),
        writer=datasets.Value("string"),
        age=datasets.Value("int32"),
        height=datasets.Value("float32"),
        note=datasets.Value("string"),
    )
    (home / "data").mkdir()
    for split in ("train", "test"):
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(str(home / "data" / f"{split}-00000-of-00001.parquet"))
    return home


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    from datasets import config

    def refuse(*args: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    cache = tmp_path_factory.getbasetemp() / "hf_cache"
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", cache)


def load(folder: Path, group: str | None = None, **args: Any) -> Dataset:
    settings = HuggingFaceArgs.model_validate({"path": folder.name, **args})
    return load_hugging_face(settings, LoadContext(0, folder.parent, group=group))


def test_images_with_classes_and_clients(folder: Path) -> None:
    data = load(folder, group="writer", features="image")
    assert data.test is not None
    wanted = np.moveaxis(PIXELS, -1, 1).astype(np.float32) / np.float32(255)
    assert np.array_equal(data.train.features, wanted)
    assert data.class_names == ("cat", "dog")
    assert data.train.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert list(data.groups["writer"]) == list("ccaabb")


def test_named_classes_are_classes_though_no_example_has_them(tmp_path: Path) -> None:
    import datasets

    labels = datasets.ClassLabel(names=["a", "b", "c"])
    features = datasets.Features(age=datasets.Value("int32"), label=labels)
    table = datasets.Dataset.from_dict(
        {"age": [1, 2, 3, 4], "label": [0, 1, 0, 1]}, features=features
    )
    table.to_parquet(str(tmp_path / "train.parquet"))
    settings = DataSettings.model_validate(
        {
            "dataset": "huggingface",
            "args": {"path": str(tmp_path), "test": None},
            "partition": {"scheme": "iid", "num_clients": 1},
        }
    )
    data = load_federated_data(settings, seed=0, base=tmp_path)
    assert (data.num_classes, data.class_names) == (3, ("a", "b", "c"))


def test_numbers_side_by_side_without_a_test_set(folder: Path) -> None:
    data = load(folder, features=["age", "height"], test=None)
    assert data.test is None
    assert data.train.features[:2].tolist() == [[1, 0.5], [2, 0.5]]
    assert not data.groups


def test_the_column_of_the_clients_is_no_feature(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("age,ward,label\n1,7,x\n2,7,y\n3,9,x\n")
    data = load(tmp_path, group="ward", test=None)
    assert data.train.features.tolist() == [[1], [2], [3]]
    assert list(data.groups["ward"]) == ["7", "7", "9"]
    assert data.class_names == ("x", "y")
    with pytest.raises(DataError, match="no column 'wards'; its columns are 'age', 'ward'"):
        load(tmp_path, group="wards", test=None)
    (tmp_path / "train.csv").write_text("age,ward,label\n1,7,x\n2,,y\n3,9,x\n")
    with pytest.raises(DataError, match="some rows of split 'train' have none; remove such rows"):
        load(tmp_path, group="ward", test=None)


def test_an_edited_folder_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("age,label\n1,0\n2,1\n")
    assert load(tmp_path, test=None).train.features.tolist() == [[1], [2]]
    (tmp_path / "train.csv").write_text("age,label\n3,0\n4,1\n")
    assert load(tmp_path, test=None).train.features.tolist() == [[3], [4]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"features": "image", "test": "validation"},
            "split 'validation' cannot be read with .*train.*test",
        ),
        ({"features": "picture"}, "has no column 'picture'; its columns are 'image', 'label'"),
        ({"target": "y"}, "has no column 'y'"),
        ({"features": "note"}, "column 'note' must hold numbers or images"),
        ({"features": ["image", "age"]}, r"'image' holds arrays of shape \(8, 8, 3\) beside"),
        ({}, "column 'writer' must hold numbers or images of one size"),
        ({"path": "absent"}, "data.args.path: .*no such folder"),
    ],
)
def test_mistakes_get_one_clear_line(args: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(folder, **args)
    assert "\n" not in str(caught.value)


def test_without_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs flwr-datasets; .*fedsim-dp\[datasets\]"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["/srv/rows", "../rows", "rows", "csv", "a/b/c", "~/rows", "./rows"]
)
def test_no_name_is_a_file_of_this_machine(name: str) -> None:
    """A node's policy names the files that an experiment may read, and the library reads others."""
    with pytest.raises(ValidationError, match="must be OWNER/NAME as on the hub"):
        HuggingFaceArgs(name=name)


def test_no_folder_is_read_in_place_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "set").mkdir(parents=True)
    (tmp_path / "owner" / "set" / "train.csv").write_text("age,label\n1,0\n2,1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="has this name too"):
        load_hugging_face(HuggingFaceArgs(name="owner/set", test=None), LoadContext(0, tmp_path))


def test_a_name_is_given_to_flwr_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr_datasets

    asked: dict[str, Any] = {}

    class Recorded:
        def __init__(self, **settings: Any) -> None:
            asked.update(settings)

        def load_split(self, split: str) -> None:
            raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Recorded)
    args = HuggingFaceArgs(name="owner/set", subset="small", revision="abc")
    with pytest.raises(DataError, match=r"name 'owner/set': split 'train' .*: no network"):
        load_hugging_face(args, LoadContext(0, Path()))
    assert asked == {
        "dataset": "owner/set", "subset": "small", "revision": "abc", "partitioners": {},
        "shuffle": False,
    }  # fmt: skip

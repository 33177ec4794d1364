"""MNIST and its relatives from small files in the official formats."""

import gzip
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from fedsim.data import DataError
from fedsim.data.builtin.mnist import read_idx
from fedsim.data.catalog import DATASETS
from fedsim.data.examples import Dataset
from fedsim.data.settings import LoadContext
from fedsim.data.sources import LOADERS

RNG = np.random.default_rng(0)
X, X_TEST = (RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (6, 3))
Y, Y_TEST = np.arange(6, dtype=np.uint8), np.array([1, 2, 3], dtype=np.uint8)
KINDS = ("images-idx3", "labels-idx1")
MNIST = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in KINDS]
EMNIST = [f"emnist-letters-{part}-{kind}-ubyte" for part in ("train", "test") for kind in KINDS]


def idx(array: np.ndarray) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes((0, 0, 8, array.ndim)) + shape + array.tobytes()


def files(*arrays: np.ndarray) -> dict[str, bytes]:
    return {name: idx(array) for name, array in zip(MNIST, arrays, strict=True)}


def write(folder: Path, names: Any = MNIST, arrays: Any = (X, Y, X_TEST, Y_TEST)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(names, arrays, strict=True):
        content = idx(array)
        if name.endswith("labels-idx1-ubyte"):  # as unpacked and as published
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    return folder


def load(name: str, folder: Path, group: str | None = None, **args: object) -> Dataset:
    settings = DATASETS[name].args.model_validate({"path": folder.name, **args})
    return LOADERS[name](settings, LoadContext(0, folder.parent, group=group))


@pytest.mark.parametrize(
    ("name", "place"),
    [("mnist", "."), ("mnist", "raw"), ("mnist", "MNIST/raw"), ("fashion_mnist", ".")],
)
def test_mnist_in_the_folders_in_which_people_keep_it(
    name: str, place: str, tmp_path: Path
) -> None:
    write(tmp_path / "data" / place)
    data = load(name, tmp_path / "data")
    assert data.test is not None
    assert data.train.features.shape == (6, 1, 28, 28)
    assert np.array_equal(data.train.features[:, 0], X.astype(np.float32) / np.float32(255))
    assert data.train.targets.tolist() == Y.tolist()
    assert data.test.targets.tolist() == Y_TEST.tolist()
    assert (data.class_names or [None])[0] == ("T-shirt/top" if name == "fashion_mnist" else None)


@pytest.mark.parametrize("packed", [True, False])
def test_emnist_is_upright_and_named(packed: bool, tmp_path: Path) -> None:
    arrays = (X.swapaxes(1, 2).copy(), Y + 1, X_TEST.swapaxes(1, 2).copy(), Y_TEST + 1)
    folder = tmp_path / "emnist"
    folder.mkdir()
    if packed:
        with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
            for name, array in zip(EMNIST, arrays, strict=True):
                archive.writestr(f"gzip/{name}.gz", gzip.compress(idx(array), 1))
            archive.writestr("../outside-ubyte", b"never read")
    else:
        write(folder / "gzip", EMNIST, arrays)
    data = load("emnist", folder, split="letters")
    assert np.array_equal(data.train.features[:, 0], X.astype(np.float32) / np.float32(255))
    assert data.train.targets.tolist() == Y.tolist()
    assert data.class_names == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert not data.groups
    assert [path.name for path in folder.iterdir()] == ["gzip.zip" if packed else "gzip"]


@pytest.mark.parametrize("packed", [True, False])
def test_emnist_for_matlab_names_the_writers(packed: bool, tmp_path: Path) -> None:
    def part(x: np.ndarray, y: np.ndarray, writers: list[int]) -> dict[str, np.ndarray]:
        images = x.swapaxes(1, 2).reshape(len(x), -1)
        return {"images": images, "labels": y[:, None], "writers": np.array(writers)[:, None]}

    content = io.BytesIO()
    train, test = part(X, Y, [7, 7, 12, 12, 12, 3000]), part(X_TEST, Y_TEST, [1, 1, 1])
    savemat(content, {"dataset": {"train": train, "test": test}}, do_compression=True)
    if packed:
        with zipfile.ZipFile(tmp_path / "matlab.zip", "w") as archive:
            archive.writestr("matlab/emnist-digits.mat", content.getvalue())
        with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:  # is read without writers
            archive.writestr("gzip/other", b"")
    else:
        (tmp_path / "emnist-digits.mat").write_bytes(content.getvalue())
    data = load("emnist", tmp_path, group="writer", split="digits")
    assert np.array_equal(data.train.features[:, 0], X.astype(np.float32) / np.float32(255))
    assert list(data.groups["writer"]) == ["0007", "0007", "0012", "0012", "0012", "3000"]


def test_classes_of_emnist() -> None:
    from fedsim.data.builtin.mnist import _CHARACTERS

    sizes = {name: len(set(characters)) for name, characters in _CHARACTERS.items()}
    assert sizes == {
        "byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "has no train-images-idx3-ubyte; get the files from the MNIST page of Yann LeCun"),
        ({MNIST[0]: idx(X)}, "has train-images-idx3-ubyte but no train-labels-idx1-ubyte"),
        ({n: b"<html>" for n in MNIST}, "is not an idx file; get the official file anew"),
        ({n: idx(X)[:40] for n in MNIST}, "is shorter than the 4,704 bytes of its header"),
        ({n: idx(X) + b"1" for n in MNIST}, "is longer than the 4,704 bytes"),
        ({n: idx(X)[:9] for n in MNIST}, "ends in its header"),
        ({n: b"\0\0\x0d\1\0\0\0\1" for n in MNIST}, "unsigned bytes of 1 or 3 dimensions"),
        ({n: b"\0\0\x08\3" + b"\xff" * 12 for n in MNIST}, "bytes, more than this machine"),
        ({f"{n}.gz": b"no gzip" for n in MNIST}, "cannot be read: Not a gzipped file"),
        ({f"{n}.gz": gzip.compress(idx(X))[:99] for n in MNIST}, "cannot be read: Compressed"),
        ({n: idx(X) for n in MNIST}, r"labels must be 0, ..., 9, got"),
        (files(X, Y + 9, X, Y), "got label 10"),
        (files(X[:, :9], Y, X, Y), "must have 28 x 28 pixels"),
    ],
)  # fmt: skip
def test_damaged_files_get_one_clear_line(
    change: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in change.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gzip.zip", b"no archive", "gzip.zip: cannot be read: File is not a zip file"),
        ("emnist-letters.mat", b"no matlab", "cannot be read"),
    ],
)
def test_damaged_archives_of_emnist(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    group = "writer" if name.endswith(".mat") else None
    with pytest.raises(DataError, match=message):
        load("emnist", tmp_path, group=group, split="letters")


def test_an_archive_without_the_files(tmp_path: Path) -> None:
    for name, member in (("gzip.zip", "other"), ("matlab.zip", "emnist-letters.mat")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, b"")
    with pytest.raises(DataError, match="has no emnist-letters-train-images-idx3-ubyte; get the"):
        load("emnist", tmp_path, split="letters")
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        archive.writestr(EMNIST[0], idx(X))
    with pytest.raises(DataError, match=r"gzip.zip has emnist-letters-train-images-idx3-ubyte but"):
        load("emnist", tmp_path, split="letters")


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder: .*the path is relative to"):
        load("mnist", tmp_path / "absent")


def test_no_more_is_read_than_the_header_says() -> None:
    endless = io.BytesIO(idx(Y) + b"\0" * 100)
    with pytest.raises(DataError, match="is longer"):
        read_idx(endless, "here")
    assert endless.tell() == len(idx(Y)) + 1

"""CIFAR-10 from small files in the official formats; the pickled ones are never unpickled."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import DataError
from fedsim.data.builtin.cifar import load_cifar10, read_pickled_batch
from fedsim.data.catalog import FolderArgs
from fedsim.data.examples import Dataset
from fedsim.data.settings import LoadContext

RNG = np.random.default_rng(0)
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
BATCHES = {
    name: (RNG.integers(0, 256, (4, 3072), dtype=np.uint8), RNG.integers(0, 10, 4).tolist())
    for name in NAMES
}


def binary(images: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
    )


def pickled(images: np.ndarray, labels: list[int]) -> bytes:
    """Return a batch as the cPickle of Python 2 wrote it, protocol 2, with strings of bytes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    shape = b"K" + bytes([len(images)]) + b"M" + (3072).to_bytes(2, "little")
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01" + shape + b"\x86" + dtype + b"\x89T"
    array += images.size.to_bytes(4, "little") + images.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    items = text(b"data") + array + text(b"labels") + numbers
    items += text(b"batch_label") + text(b"batch 1 of 5") + text(b"filenames") + b"](K\x07K\x08e"
    return b"\x80\x02}(" + items + b"u."


FORMS = {
    "bin": (binary, ".bin", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    "py": (pickled, "", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
}


def load(folder: Path) -> Dataset:
    return load_cifar10(FolderArgs(path=folder.name), LoadContext(0, folder.parent))


@pytest.mark.parametrize(
    ("form", "place"),
    [("bin", "flat"), ("py", "folder"), ("bin", "archive"), ("py", "archive")],
)
def test_both_versions_unpacked_and_packed(form: str, place: str, tmp_path: Path) -> None:
    write, suffix, folder, archive = FORMS[form]
    files = {f"{name}{suffix}": write(*batch) for name, batch in BATCHES.items()}
    if place == "archive":
        with tarfile.open(tmp_path / archive, "w:gz", compresslevel=1) as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        home = tmp_path if place == "flat" else tmp_path / folder
        home.mkdir(exist_ok=True)
        for name, content in files.items():
            (home / name).write_bytes(content)
    data = load(tmp_path)
    assert data.test is not None
    assert data.train.features.shape == (20, 3, 32, 32)
    wanted = np.concatenate([BATCHES[name][0] for name in NAMES[:5]]).reshape(20, 3, 32, 32)
    assert np.array_equal(data.train.features, wanted.astype(np.float32) / np.float32(255))
    assert data.train.targets.tolist() == [
        label for name in NAMES[:5] for label in BATCHES[name][1]
    ]
    assert data.test.targets.tolist() == BATCHES["test_batch"][1]
    assert data.class_names is not None
    assert data.class_names[::9] == ("airplane", "truck")


def test_the_test_file_is_a_pickle_that_python_reads() -> None:
    images, labels = BATCHES["test_batch"]
    loaded = pickle.loads(pickled(images, labels), encoding="bytes")
    assert np.array_equal(loaded[b"data"], images)
    assert loaded[b"labels"] == labels


@pytest.mark.parametrize("protocol", range(2, 6))
def test_batches_that_a_newer_python_wrote(protocol: int) -> None:
    images, labels = BATCHES["test_batch"]
    content = pickle.dumps({"labels": labels, "data": images, "filenames": ["a"]}, protocol)
    found, classes = read_pickled_batch(io.BytesIO(content), "here")
    assert np.array_equal(found.reshape(4, -1), images)
    assert classes.tolist() == labels


class _Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("attacked"),)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images, labels = BATCHES["test_batch"]
    content = pickle.dumps({"evil": _Attack(), "labels": labels, "data": images})
    found, _ = read_pickled_batch(io.BytesIO(content), "here")
    assert np.array_equal(found.reshape(4, -1), images)
    assert not Path("attacked").exists()
    pickle.loads(content)
    assert Path("attacked").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no data_batch_1.bin; get the files from the CIFAR page of Alex Krizhevsky"),
        ({"data_batch_1.bin": b""}, "has data_batch_1.bin but no data_batch_2.bin"),
        ({f"{n}.bin": b"1" * 3000 for n in NAMES}, "must have 3,073 bytes for each image"),
        ({f"{n}.bin": b"" for n in NAMES}, "must have 3,073 bytes for each image"),
        ({f"{n}.bin": b"\x0a" * 3073 for n in NAMES}, "labels must be 0, ..., 9, got 10"),
        ({n: b"\xffno pickle" for n in NAMES}, "is no pickled batch: .*opcode"),
        ({n: b"\x80\x02}." for n in NAMES}, "3,072 bytes of pixels for each label, got 0"),
        ({n: pickled(BATCHES[n][0], [1, 2]) for n in NAMES}, "got 12,288 and 2 labels"),
        ({"cifar-10-python.tar.gz": b"no tar"}, "cannot be read: .*file could not be opened"),
        ({"cifar-10-binary.tar.gz": b""}, "cannot be read"),
    ],
)
def test_damaged_files_get_one_clear_line(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)

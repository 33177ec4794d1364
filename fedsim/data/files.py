"""Reading of datasets from files: .npz archives of `numpy.savez`, .csv and .parquet tables."""

import lzma
import math
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsim.core.errors import one_line, raised_as
from fedsim.core.limits import machine_bytes
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.file_names import DATA_SUFFIXES, TABLE_SUFFIXES, quoted, unknown_name
from fedsim.data.settings import FileDataset, ImageSettings
from fedsim.data.tables.dataset import read_tables
from fedsim.data.tables.settings import as_text

_FEATURE_NAMES = ("x", "features")
_SPLIT_FEATURE_NAMES = ("x", "X", "features", "images", "data")
_SPLIT_FORMS = ("{name}_{split}", "{split}_{name}")


def read_npz(
    path: Path,
    target: str | None,
    *,
    tokens: bool = False,
    images: ImageSettings | None = None,
    group: str | None = None,
) -> Dataset:
    """Return the dataset in an archive of `numpy.savez`.

    The features are the array `x` or `features`, or the only array besides the target. Arrays
    `x_test` and `<target>_test` are the test set. The names that Keras and MedMNIST use work, too.
    With the target `y` these are `x_train`, `y_train`, `x_test`, `y_test`. With the target `labels`
    they are `train_images`, `train_labels` and so on. Pickled objects are never loaded.

    Guarantee: only these arrays are read. The archive must hold as many bytes as their headers
    declare, and all of them must fit into this machine's memory.

    Args:
        path: the archive.
        target: name of the array of targets, without the prefix or suffix `train` or `test`. None
            reads the features only, and all targets are 0.
        tokens: whether features are tokens (see `to_dataset`).
        images: the setting `data.images`.
        group: name of the array (n,) with the client of each training example; None if no array
            divides the examples.

    Raises:
        DataError: the archive is damaged, a name is missing or ambiguous, or an array cannot be
            used.
    """
    with _opened(path) as (archive, names):
        if group is not None and group not in names:
            raise DataError(unknown_name(path, "array", group, names))
        left = [name for name in names if name != group]
        chosen = _choose_arrays(path, target, left) if target else [_feature_array(path, left)]
        _check_sizes(path, archive, [*chosen, group])
        arrays = [None if name is None else _read(archive, name) for name in chosen]
        clients = None if group is None else _read(archive, group)
    if target is None and arrays[0] is not None:
        arrays.append(np.zeros(arrays[0].shape[:1], np.int64))
    with raised_as(DataError, f"{path}: "):
        data = to_dataset(*arrays, tokens=tokens, images=images)
    if group is None or clients is None:
        return data
    kind = clients.dtype.kind
    names = (clients.astype(str) if kind == "S" else clients).tolist()
    if clients.shape != (len(data.train),) or kind not in "iubUS" or "" in names:
        raise DataError(
            f"{path}: array {group!r} names the client of each of {len(data.train)} training "
            "examples as whole numbers or text that is not empty, got "
            f"{clients.dtype} of shape {clients.shape}"
        )
    return data._replace(groups={group: tuple(map(as_text, names))})


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an archive.

    Raises:
        DataError: the file is not an archive.
    """
    with _opened(path) as (_, names):
        return names


@contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, list[str]]]:
    """Context manager that opens an archive, and gives it with the names of its arrays."""
    if not zipfile.is_zipfile(path):  # np.load also accepts a single array
        raise DataError(f"{path}: is not an .npz archive; write one with numpy.savez")
    with readable(path, " as .npz without pickle"), zipfile.ZipFile(path) as archive:
        yield archive, [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]


@contextmanager
def readable(path: Path, way: str = "") -> Iterator[None]:
    """Context manager that turns each error of reading a file into a `DataError`.

    Args:
        path: the file.
        way: words for the error message on how the file is read, with a space before them.
    """
    try:
        yield
    except DataError:
        raise
    except (
        *(OSError, EOFError, ValueError, MemoryError, RuntimeError, NotImplementedError),
        *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    ) as error:
        raise DataError(f"{path}: cannot be read{way}: {one_line(error)}") from error


def _choose_arrays(path: Path, target: str, names: list[str]) -> list[str | None]:
    """Return the names of features, targets, test features and test targets."""
    for form in _SPLIT_FORMS:
        target_of = _strip_split(form, target)
        if form.format(name=target_of, split="train") in names:
            return _choose_splits(path, form, target_of, names)
    tests = ["x_test", f"{target}_test"]
    left = [name for name in names if name not in tests]
    if target not in left:
        raise DataError(unknown_name(path, "array", target, left))
    features = _feature_array(path, [name for name in left if name != target])
    return [features, target, *_test_arrays(path, tests, names)]


def _test_arrays(path: Path, tests: list[str], names: list[str]) -> list[str] | list[None]:
    """Return the names of test features and test targets, or None for each without a test set."""
    missing = [name for name in tests if name not in names]
    if len(missing) == 1:
        raise DataError(f"{path}: a test set needs both of {quoted(tests)}; add the other")
    return [None, None] if missing else tests


def _strip_split(form: str, name: str) -> str:
    """Return `y` for `y_train` or `train_y`, and other names unchanged."""
    before, after = form.format(name="|", split="train").split("|")
    if len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return name


def _choose_splits(path: Path, form: str, target: str, names: list[str]) -> list[str | None]:
    """Return the names of the arrays in an archive whose names contain `train` or `test`."""
    features = [
        name for name in _SPLIT_FEATURE_NAMES if form.format(name=name, split="train") in names
    ]
    if len(features) != 1:
        wanted = quoted(form.format(name=name, split="train") for name in _SPLIT_FEATURE_NAMES)
        raise DataError(f"{path}: the features must be one of {wanted}; got {quoted(names[:10])}")
    train, tests = (
        [form.format(name=name, split=split) for name in (features[0], target)]
        for split in ("train", "test")
    )
    return [*train, *_test_arrays(path, tests, names)]


def _feature_array(path: Path, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    named = [name for name in _FEATURE_NAMES if name in names]
    if len(named) == 1:
        return named[0]
    raise DataError(
        f"{path}: the features must be the only array beside the target, or be named x or "
        f"features; got {quoted(names[:10]) or 'no other array'}"
    )


def _check_sizes(path: Path, archive: zipfile.ZipFile, names: list[str | None]) -> None:
    """Check by headers only that the arrays have their declared size and fit into memory."""
    total = 0
    for name in filter(None, names):
        with archive.open(f"{name}.npy") as member:
            shape, dtype = _header(member)
            declared = math.prod(shape) * dtype.itemsize
            start = member.tell()
        held = archive.getinfo(f"{name}.npy").file_size - start
        if declared != held:
            raise DataError(
                f"{path}: array {name!r} has shape {shape} of {dtype}, which are {declared:,} "
                f"bytes, but the archive holds {held:,}; write it anew with numpy.savez"
            )
        total += declared
    if total > machine_bytes():
        raise DataError(
            f"{path}: the arrays need {total / 2**30:,.0f} GiB, and this machine has "
            f"{machine_bytes() / 2**30:,.0f} GiB of memory"
        )


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, dtype


def _read(archive: zipfile.ZipFile, name: str) -> NDArray[np.generic]:
    with archive.open(f"{name}.npy") as member:
        return npy.read_array(member, allow_pickle=False)


def read_files(
    paths: Mapping[str, Path],
    settings: FileDataset,
    *,
    test: Path | None = None,
    group: str | None = None,
    tokens: bool = False,
    images: ImageSettings | None = None,
) -> Dataset:
    """Return the dataset in one archive, or in one or more tables.

    Args:
        paths: the data files in order, by their names, which are public.
        settings: the setting `data.dataset`.
        test: the file of the public test set; None if there is none.
        group: the column that divides the rows among clients; None if no column does.
        tokens: whether features are tokens (see `to_dataset`).
        images: the setting `data.images`, used for .npz only.

    Raises:
        DataError: a file is missing, has another suffix, or its content cannot be used.
    """
    for path in (*paths.values(), *([] if test is None else [test])):
        check_file(path)
    first = next(iter(paths.values()))
    if all(path.suffix.lower() in TABLE_SUFFIXES for path in paths.values()):
        return read_tables(paths, settings, test=test, group=group, tokens=tokens)
    if len(paths) > 1 or test is not None or settings.columns:
        raise DataError(
            f"data.dataset: {first} is an archive, and columns, test and several files are for "
            ".csv and .parquet tables; its own test set are the arrays x_test and "
            f"{settings.target}_test"
        )
    return read_npz(first, settings.target, tokens=tokens, images=images, group=group)


def check_file(path: Path) -> None:
    """Check that a data file exists and has a suffix that can be read.

    Raises:
        DataError: the file is missing or has another suffix.
    """
    if path.suffix.lower() not in DATA_SUFFIXES:
        raise DataError(f"data.dataset: {path} must be a .npz, .csv or .parquet file")
    if not path.is_file():
        raise DataError(
            f"data.dataset: no such file: {path}; the path is relative to the experiment file"
        )

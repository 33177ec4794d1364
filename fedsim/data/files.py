"""Datasets from files: .npz archives, .csv and .parquet tables."""

from collections.abc import Mapping
from pathlib import Path

from fedsim.data.arrays.npz_file import read_npz
from fedsim.data.conversion import Dataset
from fedsim.data.examples import DataError
from fedsim.data.settings import FileDataset, ImageSettings
from fedsim.data.tables.dataset import read_tables

TABLE_SUFFIXES = (".csv", ".parquet")
SUFFIXES = (".npz", *TABLE_SUFFIXES)


def read_files(
    paths: Mapping[str, Path],
    settings: FileDataset,
    *,
    test: Path | None = None,
    group: str | None = None,
    tokens: bool = False,
    images: ImageSettings | None = None,
) -> Dataset:
    """Return the dataset in one archive, or in one or several tables.

    Args:
        paths: the files by name, in order.
        settings: `data.dataset`.
        test: the file of the public test set, or None.
        group: the column that divides the rows among clients, or None.
        tokens: whether features are tokens (see `to_dataset`).
        images: `data.images` of the experiment, for .npz.

    Raises:
        DataError: a file is missing, of another kind, or its content cannot be used.
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
    """Check that a data file is there and of a kind that can be read.

    Raises:
        DataError: it is missing or of another kind.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"data.dataset: {path} must be a .npz, .csv or .parquet file")
    if not path.is_file():
        raise DataError(
            f"data.dataset: no such file: {path}; the path is relative to the experiment file"
        )

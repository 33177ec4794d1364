"""Rules of `data.dataset`: names, files, and settings that exclude each other."""

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from fedsim.data.catalog import DATASETS
from fedsim.data.file_names import TooManyFilesError, matching_files
from fedsim.data.partitions.settings import (
    ColumnPartition,
    FilesPartition,
    FlwrPartition,
    FunctionPartition,
    group_column,
)
from fedsim.data.settings import DataSettings, FileDataset
from fedsim.data.tables.settings import ColumnSettings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage, validation_messages
from fedsim.experiment.references import check_data_file, check_folder, check_name, check_table_file
from fedsim.experiment.rules.sections import finite_messages, messages_at

_DATASET: KeyPath = ("data", "dataset")
_ARGS: KeyPath = ("data", "args")
_PARTITION: KeyPath = ("data", "partition")


def check_data(data: DataSettings, base: Path) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule of `data:`.

    Args:
        data: the section.
        base: the directory in which relative paths start.
    """
    yield from finite_messages(data.args, _ARGS)
    yield from _check_images(data)
    yield from _check_partition(data, base)
    if isinstance(data.dataset, FileDataset):
        yield from _check_file_dataset(data, data.dataset, base)
        return
    yield from messages_at(_DATASET, check_name(data.dataset, "dataset", DATASETS, base))
    if data.dataset in DATASETS:
        yield from _check_built_in(data, data.dataset, base)


def _check_built_in(data: DataSettings, name: str, base: Path) -> Iterator[PathMessage]:
    entry = DATASETS[name]
    yield from _check_group(data, name)
    if not entry.args.model_fields:
        if data.args:
            yield _ARGS, f"the built-in dataset {name!r} takes no arguments; remove args"
        return
    try:
        entry.args.model_validate(data.args)
    except ValidationError as error:
        yield from validation_messages(error, data.args, entry.args, _ARGS)
    if data.folder is not None:
        yield from messages_at((*_ARGS, "path"), check_folder(data.folder, base))


def _check_group(data: DataSettings, name: str) -> Iterator[PathMessage]:
    groups, wanted = DATASETS[name].groups, group_column(data.partition)
    if groups is None or wanted is None or wanted in groups:
        return
    own = f"it has {', '.join(map(repr, groups))}" if groups else "use another scheme"
    is_column = data.partition.scheme == "column"
    path = (*_PARTITION, *(("column",) if is_column else ("args", "partition_by")))
    yield path, f"{name} has no column {wanted!r} that names clients; {own}"


def _check_images(data: DataSettings) -> Iterator[PathMessage]:
    path: KeyPath = ("data", "images")
    if data.images is None:
        return
    if data.features == "tokens":
        yield path, "images are numbers, and data.features is tokens; remove images"
    elif isinstance(data.dataset, FileDataset):
        if not str(data.dataset.path).lower().endswith(".npz"):
            yield path, "is for arrays in an .npz file, and the dataset is a table; remove images"
    elif data.dataset in DATASETS and data.dataset != "huggingface":
        yield path, f"the built-in dataset {data.dataset!r} has its layout and range; remove images"


def _check_partition(data: DataSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in a partition that follows the data or a function."""
    division = data.partition
    if isinstance(division, FunctionPartition | FlwrPartition):
        yield from finite_messages(division.args, (*_PARTITION, "args"))
    if isinstance(division, FunctionPartition):
        problem = check_name(division.scheme, "partition scheme", (), base)
        yield from messages_at((*_PARTITION, "scheme"), problem)
    if not isinstance(division, FilesPartition):
        return
    if not isinstance(data.dataset, FileDataset):
        yield (
            _DATASET,
            "scheme files reads tables, whose target is to be named; write "
            "dataset: {target: COLUMN, columns: ...}",
        )
    try:
        files = matching_files(division.pattern, base)
    except TooManyFilesError as error:
        yield (*_PARTITION, "pattern"), str(error)
        return
    if not files:
        yield (*_PARTITION, "pattern"), f"no file matches {os.path.join(base, division.pattern)!r}"
    for path in files.values():
        problem = check_table_file(str(path), base)
        if problem is not None:
            yield (*_PARTITION, "pattern"), f"matches {path.name!r}, and a table {problem}"
            return


def _check_file_dataset(
    data: DataSettings, dataset: FileDataset, base: Path
) -> Iterator[PathMessage]:
    if data.args:
        yield _ARGS, "a data file takes no arguments; remove args"
    if isinstance(data.partition, FilesPartition):
        if dataset.path is not None:
            yield (
                (*_DATASET, "path"),
                "data.partition.pattern names the files; remove path, or use scheme: column",
            )
    elif dataset.path is None:
        purpose = FileDataset.model_fields["path"].description
        yield (*_DATASET, "path"), f"missing; {purpose}"
    else:
        yield from messages_at((*_DATASET, "path"), check_data_file(dataset.path, base))
    if dataset.test is not None:
        yield from messages_at((*_DATASET, "test"), check_table_file(dataset.test, base))
        if data.test_fraction is not None:
            yield (
                ("data", "test_fraction"),
                "dataset.test is the test set, so no rows are held out; remove one of them",
            )
    if dataset.path is not None and dataset.path.lower().endswith(".npz"):
        for key in ("columns", "test"):
            if getattr(dataset, key):
                yield (
                    (*_DATASET, key),
                    "is for .csv and .parquet tables, and an .npz archive holds arrays of numbers; "
                    f"remove {key} (the archive's own test set: x_test and {dataset.target}_test)",
                )
    column = group_column(data.partition)
    if column is not None and column in dataset.columns:
        yield (
            (*_DATASET, "columns", column),
            "this column divides the rows among clients and is no feature; remove it here",
        )
    if isinstance(data.partition, ColumnPartition) and column == dataset.target:
        yield (
            (*_PARTITION, "column"),
            f"{column!r} is the target, and a client would hold one class; name another column, or "
            "use scheme: shards",
        )
    if data.features == "tokens":
        for name, one in dataset.columns.items():
            if isinstance(one, ColumnSettings) and name != dataset.target:
                yield (
                    (*_DATASET, "columns", name),
                    "makes numbers of the cells, and data.features is tokens; remove it, or drop "
                    "the column",
                )

"""Datasets from files: .npz archives, .csv and .parquet tables."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.conversion import Dataset, to_dataset
from fedsim.data.examples import DataError
from fedsim.data.names import unknown_name
from fedsim.data.npz_file import read_npz
from fedsim.data.parquet_file import read_parquet
from fedsim.data.settings import ImageSettings

_WHOLE = re.compile(r"\d+", re.ASCII)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def read_file(
    path: Path, target: str, *, tokens: bool = False, images: ImageSettings | None = None
) -> Dataset:
    """Return the dataset in a file.

    Args:
        path: a .npz, .csv or .parquet file.
        target: the array or column to predict.
        tokens: whether features are tokens (see `to_dataset`).
        images: `data.images` of the experiment, for .npz.

    Raises:
        DataError: the file is missing, of another kind, or its content cannot be used.
    """
    readers = {".npz": partial(read_npz, images=images), ".csv": read_csv, ".parquet": read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data.dataset: {path} must be a .npz, .csv or .parquet file")
    if not path.is_file():
        raise DataError(
            f"data.dataset: no such file: {path}; the path is relative to the experiment file"
        )
    return reader(path, target, tokens=tokens)


def read_csv(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Return the dataset in a table with a header row; all columns but `target` are features.

    | cells of the target                             | targets                          |
    |-------------------------------------------------|----------------------------------|
    | all text                                        | classes, numbered in sorted order |
    | all whole numbers from 0, without decimal point | classes with these numbers       |
    | other numbers                                   | real numbers for regression      |

    Args:
        path: the file.
        target: the column to predict.
        tokens: whether features are tokens (see `to_dataset`).

    Raises:
        DataError: the table cannot be used, or a cell is empty or not a number; the message names
            file, line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = _rows(lines)
            header = next(rows, (0, []))[1]
            column = _check_header(path, header, target)
            x, y, numbers = _read_cells(path, header, column, rows)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 comma-separated text: {error}") from error
    if not x:
        raise DataError(f"{path}: no rows below the header; add the examples")
    try:
        return to_dataset(np.array(x), _csv_targets(path, target, y, numbers), tokens=tokens)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) of the rows that are not blank."""
    reader = csv.reader(lines, strict=True)
    for row in reader:
        cells = [cell.strip() for cell in row]
        if cells not in ([], [""]):
            yield reader.line_num, cells


def _check_header(path: Path, header: list[str], target: str) -> int:
    if not header:
        raise DataError(f"{path}: is empty; the first row must name the columns")
    if target not in header:
        raise DataError(unknown_name(path, "column", target, header))
    if "" in header:
        raise DataError(
            f"{path}:1: column {header.index('') + 1} has no name; name or remove the column"
        )
    repeated = sorted(name for name, times in Counter(header).items() if times > 1)
    if repeated:
        raise DataError(f"{path}:1: two columns are named {repeated[0]!r}; rename or remove one")
    if len(header) < 2:
        raise DataError(f"{path}: no column beside the target {target!r}; add a feature")
    return header.index(target)


def _read_cells(
    path: Path, header: list[str], column: int, rows: Iterator[tuple[int, list[str]]]
) -> tuple[list[list[float]], list[str], list[int]]:
    """Return features, target cells and their line numbers."""
    x: list[list[float]] = []
    y: list[str] = []
    numbers: list[int] = []
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}:{number}: a row must have {len(header)} cells as the header has, got "
                f"{len(row)}; fix or remove the row"
            )
        values = []
        for index, (name, cell) in enumerate(zip(header, row, strict=True)):
            value = _number(cell)
            if not cell or (index != column and value is None):
                problem = f"{cell!r} is not a finite number" if cell else "the cell is empty"
                raise DataError(
                    f"{path}:{number}: column {name!r}: {problem}; fix the cell or remove the row"
                )
            if index != column and value is not None:
                values.append(value)
        x.append(values)
        y.append(row[column])
        numbers.append(number)
    return x, y, numbers


def _csv_targets(
    path: Path, target: str, cells: list[str], numbers: list[int]
) -> NDArray[np.int64] | NDArray[np.float64] | list[str]:
    values = [_number(cell) for cell in cells]
    text = [index for index, value in enumerate(values) if value is None]
    if len(text) == len(cells):
        return cells
    if text:  # a stray "NA" must not turn every number into a class name
        raise DataError(
            f"{path}:{numbers[text[0]]}: column {target!r}: {cells[text[0]]!r} is not a finite "
            "number but other targets are; fix or remove the row, or write every class as text"
        )
    if all(_WHOLE.fullmatch(cell) and len(cell) <= 18 for cell in cells):
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    return np.array(values, dtype=np.float64)


def _number(cell: str) -> float | None:
    """Return the number in a cell, or None if it is no float32 number; 1_000 is text."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= _FLOAT32_MAX and "_" not in cell else None

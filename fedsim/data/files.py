"""Reads datasets from files: .npz archives, .csv and .parquet tables."""

import csv
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.conversion import Dataset, to_dataset
from fedsim.data.examples import DataError
from fedsim.data.names import no_such, quoted
from fedsim.data.parquet_file import read_parquet

_WHOLE = re.compile(r"\d+", re.ASCII)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FEATURE_NAMES = ("x", "features")


def read_file(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Read a dataset from a file; for `tokens`, see `to_dataset`.

    Raises:
        DataError: for a missing file, another kind of file, or unfit content.
    """
    readers = {".npz": read_npz, ".csv": read_csv, ".parquet": read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data.dataset: {path} must be a .npz, .csv or .parquet file")
    if not path.is_file():
        raise DataError(
            f"data.dataset: no such file: {path}; the path is relative to the experiment file"
        )
    return reader(path, target, tokens=tokens)


def read_npz(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Read arrays saved by `numpy.savez`.

    `target` names the array of targets. The features are the only other array, or the one named
    `x` or `features`. Arrays `x_test` and `<target>_test` together are the dataset's own test set.
    Pickled objects are never loaded.

    Raises:
        DataError: for a damaged archive, missing or unclear names, or unfit arrays.
    """
    if not zipfile.is_zipfile(path):  # np.load would take a lone array for it
        raise DataError(f"{path}: is not an .npz archive; write it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as .npz without pickle: {error}") from error
    names = {"x_test", f"{target}_test"}
    if len(names & arrays.keys()) == 1:
        raise DataError(f"{path}: a test set needs both of {quoted(names)}, got only one")
    test = [arrays.pop(name, None) for name in ("x_test", f"{target}_test")]
    if target not in arrays:
        raise DataError(no_such(path, "array", target, arrays))
    y = arrays.pop(target)
    x = arrays[_feature_array(path, list(arrays))]
    try:
        return to_dataset(x, y, *test, tokens=tokens)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _feature_array(path: Path, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    named = [name for name in _FEATURE_NAMES if name in names]
    if len(named) == 1:
        return named[0]
    raise DataError(
        f"{path}: the features must be the only array beside the target, or be named x or "
        f"features; got {quoted(names) or 'no other array'}"
    )


def read_csv(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Read a table with a header row; every column but `target` is a numeric feature.

    The targets are classes if they are all text (numbered in sorted order) or all non-negative
    whole numbers written without a decimal point (kept as they are: 0, 1, 2); otherwise they are
    real numbers to regress on.

    Raises:
        DataError: naming file, line and column, for a cell that is missing or not a number.
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
        raise DataError(f"{path}: there are no rows below the header")
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
        raise DataError(no_such(path, "column", target, header))
    if "" in header:
        raise DataError(
            f"{path}:1: column {header.index('') + 1} has no name; name it, or drop a row index"
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}:1: columns must have different names, repeated: {repeated[0]!r}")
    if len(header) < 2:
        raise DataError(f"{path}: there must be at least one column beside the target {target!r}")
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
                f"{path}:{number}: the header names {len(header)} columns, this row has {len(row)}"
            )
        values = []
        for index, (name, cell) in enumerate(zip(header, row, strict=True)):
            value = _number(cell)
            if not cell or (index != column and value is None):
                problem = f"{cell!r} is not a finite number" if cell else "the cell is empty"
                raise DataError(f"{path}:{number}: column {name!r}: {problem}; mend or drop it")
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
            "number but other targets are; mend or drop it, or spell every class as text"
        )
    if all(_WHOLE.fullmatch(cell) and len(cell) <= 18 for cell in cells):
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    return np.array(values, dtype=np.float64)


def _number(cell: str) -> float | None:
    """Return the number a cell spells if float32 holds it, or None; Python's 1_000 is none."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= _FLOAT32_MAX and "_" not in cell else None

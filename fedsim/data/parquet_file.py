"""Reads datasets from Parquet tables, with pyarrow, which is an extra."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.conversion import Dataset, to_dataset
from fedsim.data.examples import DataError
from fedsim.data.names import no_such


def read_parquet(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Read a Parquet table; every column but `target` is a numeric feature.

    Targets of text are classes (numbered in sorted order), whole numbers and booleans are classes
    as they are, other numbers are regressed on: the type of the column decides, not its values.
    For `tokens`, see `to_dataset`.

    Raises:
        DataError: pyarrow is not installed, or naming file and column, for what is missing or not a
            finite number.
    """
    table = _table(path)
    names: list[str] = table.column_names
    if target not in names:
        raise DataError(no_such(path, "column", target, names))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{path}: columns must have different names, repeated: {repeated[0]!r}")
    features = [name for name in names if name != target]
    if not features:
        raise DataError(f"{path}: there must be at least one column beside the target {target!r}")
    if table.num_rows == 0:
        raise DataError(f"{path}: there are no rows")
    x = np.stack([_feature(path, name, table.column(name)) for name in features], axis=1)
    try:
        return to_dataset(x, _target(path, target, table.column(target)), tokens=tokens)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _table(path: Path) -> Any:
    if find_spec("pyarrow") is None:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: install the extra with "
            "pip install 'fedsim-dp[parquet]', or write the table as .csv or .npz"
        )
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path, memory_map=True).read()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be read as Parquet: {reason}") from error


def _feature(path: Path, name: str, column: Any) -> NDArray[Any]:
    values = _values(path, name, column)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{path}: column {name!r} must be numeric, got {column.type}; encode text and "
            "categories as numbers, or drop it"
        )
    with np.errstate(over="ignore"):
        wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{path}: column {name!r}, row {row + 1}: {values[row]} is not a finite number; mend "
            "or drop it"
        )
    return values


def _target(path: Path, name: str, column: Any) -> NDArray[Any] | list[str]:
    values = _values(path, name, column)
    return values.tolist() if values.dtype.kind == "O" else values


def _values(path: Path, name: str, column: Any) -> NDArray[Any]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(
            f"{path}: column {name!r}, row {row + 1}: the cell is empty; mend or drop it"
        )
    if hasattr(column.type, "value_type") and hasattr(column.type, "index_type"):  # categories
        column = column.cast(column.type.value_type)
    return column.to_numpy()

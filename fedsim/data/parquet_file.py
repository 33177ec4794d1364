"""Datasets from Parquet tables; needs pyarrow, an extra."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import machine_bytes
from fedsim.data.conversion import Dataset, to_dataset
from fedsim.data.examples import DataError
from fedsim.data.names import unknown_name


def read_parquet(path: Path, target: str, *, tokens: bool = False) -> Dataset:
    """Return the dataset in a Parquet table; all columns but `target` are numeric features.

    The type of the target's column decides: text becomes classes in sorted order, whole numbers and
    booleans are classes with these numbers, other numbers are for regression.

    Args:
        path: the file.
        target: the column to predict.
        tokens: whether features are tokens (see `to_dataset`).

    Raises:
        DataError: pyarrow is not installed, the table cannot be used, or a value is missing or not
            finite; the message names file and column.
    """
    table = _table(path)
    names: list[str] = table.column_names
    if target not in names:
        raise DataError(unknown_name(path, "column", target, names))
    repeated = sorted(name for name, times in Counter(names).items() if times > 1)
    if repeated:
        raise DataError(f"{path}: two columns are named {repeated[0]!r}; rename or remove one")
    features = [name for name in names if name != target]
    if not features:
        raise DataError(f"{path}: no column beside the target {target!r}; add a feature")
    if table.num_rows == 0:
        raise DataError(f"{path}: the table has no rows; add the examples")
    x = np.stack([_feature(path, name, table.column(name)) for name in features], axis=1)
    try:
        return to_dataset(x, _target(path, target, table.column(target)), tokens=tokens)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _table(path: Path) -> Any:
    if find_spec("pyarrow") is None:
        raise DataError(
            f"{path}: Parquet needs pyarrow; install it with "
            "pip install 'fedsim-dp[parquet]', or write the table as .csv or .npz"
        )
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, memory_map=True)
        cells = file.metadata.num_rows * file.metadata.num_columns
        if 4 * cells > machine_bytes():  # features become float32
            raise DataError(
                f"{path}: {cells:,} cells need more memory than this machine has "
                f"({machine_bytes() >> 30} GiB)"
            )
        return file.read()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be read as Parquet: {reason}") from error


def _feature(path: Path, name: str, column: Any) -> NDArray[Any]:
    values = _values(path, name, column)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{path}: column {name!r} must be numeric, got {column.type}; encode text and "
            "categories as numbers, or remove the column"
        )
    with np.errstate(over="ignore"):
        wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{path}: column {name!r}, row {row + 1}: {values[row]} is not a finite number; fix "
            "or remove the row"
        )
    return values


def _target(path: Path, name: str, column: Any) -> NDArray[Any] | list[str]:
    values = _values(path, name, column)
    return values.tolist() if values.dtype.kind == "O" else values


def _values(path: Path, name: str, column: Any) -> NDArray[Any]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(
            f"{path}: column {name!r}, row {row + 1}: the cell is empty; fix or remove the row"
        )
    if hasattr(column.type, "value_type") and hasattr(column.type, "index_type"):  # categories
        column = column.cast(column.type.value_type)
    return column.to_numpy()

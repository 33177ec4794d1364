"""Parquet tables; needs pyarrow, an extra."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import machine_bytes
from fedsim.data.examples import DataError
from fedsim.data.tables.column import Cells
from fedsim.data.tables.settings import as_text
from fedsim.data.tables.table import Block, check_names


@dataclass(frozen=True)
class ParquetTable:
    """A .parquet file: columns with types.

    Attributes:
        path: the file.
        names: names of the columns.
        content: the table, of pyarrow.
    """

    path: Path
    names: tuple[str, ...]
    content: Any

    @classmethod
    def open(cls, path: Path) -> "ParquetTable":
        """Return the table.

        Raises:
            DataError: pyarrow is not installed, or the file cannot be read.
        """
        content = _read(path)
        names = tuple(content.column_names)
        check_names(path, names)
        return cls(path, names, content)

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Yield the cells of some columns: numbers with NaN where missing, dates, or text.

        Raises:
            DataError: a column has a type that no column of a table may have.
        """
        rows = self.content.num_rows
        if rows:
            cells = {name: self._cells(name) for name in columns}
            yield Block(cells, range(1, rows + 1))

    def where(self, place: int) -> str:
        """Return the file and number of a row, from 1."""
        return f"{self.path}: row {place}"

    def _cells(self, name: str) -> Cells:
        from pyarrow import types

        column = self.content.column(name)
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            return _numbers(column)
        if types.is_date(kind) or types.is_timestamp(kind):
            return column.to_numpy()
        if types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind):
            return [as_text(one) if one is not None else "" for one in column.to_pylist()]
        raise DataError(
            f"{self.path}: column {name!r} must be numbers, text, truth values or dates, got "
            f"{kind}; convert the column, or set data.dataset.columns: {{{name}: drop}}"
        )


def _numbers(column: Any) -> NDArray[Any]:
    """Return the numbers (n,): of the column's own type, or float64 with NaN where missing."""
    if not column.null_count:
        return column.to_numpy()
    return np.array([np.nan if one is None else one for one in column.to_pylist()], np.float64)


def _read(path: Path) -> Any:
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

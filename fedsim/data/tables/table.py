"""Reading of tables from disk in blocks of rows: .csv text and, with pyarrow, Parquet."""

import csv
from codecs import lookup
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import machine_bytes
from fedsim.data.examples import DataError
from fedsim.data.tables.column import Cells
from fedsim.data.tables.settings import as_text


@dataclass(frozen=True)
class TableBlock:
    """A block of n consecutive rows of a table.

    Attributes:
        cells: n cells of each requested column, by name.
        places: line number (.csv) or row number (.parquet) of each row in the file.
    """

    cells: Mapping[str, Cells]
    places: Sequence[int]


def check_names(path: Path, header: Sequence[str]) -> None:
    """Check that every column has a name and that no name is repeated.

    Args:
        path: the file.
        header: names of the columns.

    Raises:
        DataError: a name is empty or repeated.
    """
    if "" in header:
        raise DataError(
            f"{path}:1: column {list(header).index('') + 1} has no name; name or remove the column "
            "(pandas: to_csv(index=False))"
        )
    repeated = sorted(name for name, times in Counter(header).items() if times > 1)
    if repeated:
        raise DataError(f"{path}:1: two columns are named {repeated[0]!r}; rename or remove one")


_DELIMITERS = (",", ";", "\t", "|")
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class CsvTable:
    """A table in a .csv file with a header row.

    Attributes:
        path: the file.
        names: names of the columns, from the header.
        delimiter: the character that separates cells.
        encoding: encoding of the text, by its name in Python.
    """

    path: Path
    names: tuple[str, ...]
    delimiter: str
    encoding: str

    @classmethod
    def open(cls, path: Path, *, wanted: str, encoding: str = "utf-8") -> "CsvTable":
        """Return the table of a .csv file; the delimiter follows from the header alone.

        Args:
            path: the file.
            wanted: name of a column. The first delimiter among comma, semicolon, tab and | with
                which the header has this column is taken; if none, the one with most columns.
            encoding: encoding of the text.

        Raises:
            DataError: the file cannot be read or has no usable header.
        """
        headers, mistakes = dict[str, list[str]](), list[DataError]()
        for mark in _DELIMITERS:
            try:
                headers[mark] = next(_rows(path, mark, encoding), (0, []))[1]
            except DataError as error:  # "a";"b" cannot be split by commas
                mistakes.append(error)
        if mistakes and max(map(len, headers.values()), default=0) < 2:
            raise mistakes[0]
        if not any(headers.values()):
            raise DataError(f"{path}: is empty; the first row must name the columns")
        has = [mark for mark, names in headers.items() if wanted in names]
        chosen = has[0] if has else max(headers, key=lambda mark: len(headers[mark]))
        check_names(path, headers[chosen])
        return cls(path, tuple(headers[chosen]), chosen, encoding)

    def blocks(self, columns: Sequence[str]) -> Iterator[TableBlock]:
        """Yield the cells of the given columns as text, `_BLOCK_ROWS` rows at a time.

        Raises:
            DataError: the file cannot be read, or a row and the header have different numbers of
                cells.
        """
        wanted = [self.names.index(name) for name in columns]
        rows = islice(_rows(self.path, self.delimiter, self.encoding), 1, None)
        while taken := list(islice(rows, _BLOCK_ROWS)):
            for line, row in taken:
                self._check_width(line, row)
            cells = {self.names[index]: [row[index] for _, row in taken] for index in wanted}
            yield TableBlock(cells, [line for line, _ in taken])

    def where(self, place: int) -> str:
        """Return the file and line of a row for messages, given its line number."""
        return f"{self.path}:{place}"

    def _check_width(self, line: int, row: list[str]) -> None:
        if len(row) != len(self.names):
            raise DataError(
                f"{self.where(line)}: a row must have {len(self.names)} cells as the header has, "
                f"got {len(row)}; fix or remove the row"
            )


def _rows(path: Path, delimiter: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) of the rows that are not blank."""
    form = "utf-8-sig" if lookup(encoding).name == "utf-8" else encoding
    try:
        with path.open(newline="", encoding=form) as lines:
            reader = csv.reader(lines, strict=True, delimiter=delimiter)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield reader.line_num, cells
    except (csv.Error, UnicodeError) as error:
        advice = (
            "" if isinstance(error, csv.Error) else "; set data.dataset.encoding, such as cp1252"
        )
        raise DataError(
            f"{path}: cannot be read as {encoding.upper()} comma-separated text: {error}{advice}"
        ) from error


@dataclass(frozen=True)
class ParquetTable:
    """A table in a .parquet file, whose columns have types.

    Attributes:
        path: the file.
        names: names of the columns.
        content: the content as a `pyarrow.Table`.
    """

    path: Path
    names: tuple[str, ...]
    content: Any

    @classmethod
    def open(cls, path: Path) -> "ParquetTable":
        """Return the table of a .parquet file.

        Raises:
            DataError: pyarrow is not installed, or the file cannot be read.
        """
        content = _read(path)
        names = tuple(content.column_names)
        check_names(path, names)
        return cls(path, names, content)

    def blocks(self, columns: Sequence[str]) -> Iterator[TableBlock]:
        """Yield the cells of the given columns, all rows at once, as numbers, dates or text.

        A missing number is NaN.

        Raises:
            DataError: a column has a type that is not supported.
        """
        rows = self.content.num_rows
        if rows:
            cells = {name: self._cells(name) for name in columns}
            yield TableBlock(cells, range(1, rows + 1))

    def where(self, place: int) -> str:
        """Return the file and the row number (from 1) of a row for messages."""
        return f"{self.path}: row {place}"

    def _cells(self, name: str) -> Cells:
        from pyarrow import types

        column = self.content.column(name)
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            return _numbers(column)
        if types.is_date(kind):
            return column.to_numpy()
        if types.is_timestamp(kind):
            return column.to_numpy().astype("datetime64[us]")
        if types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind):
            return [as_text(cell) if cell is not None else "" for cell in column.to_pylist()]
        raise DataError(
            f"{self.path}: column {name!r} must be numbers, text, truth values or dates, got "
            f"{kind}; convert the column, or set data.dataset.columns: {{{name}: drop}}"
        )


Table = CsvTable | ParquetTable
"""A table file with named columns."""


def _numbers(column: Any) -> NDArray[Any]:
    """Return the numbers (n,) in the column's type, or as float64 with NaN for missing cells.

    Truth values with missing cells are an array of objects, with None for a missing cell.
    """
    if not column.null_count:
        return column.to_numpy()
    cells = np.array(column.to_pylist(), object)
    return cells if str(column.type) == "bool" else cells.astype(np.float64)


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

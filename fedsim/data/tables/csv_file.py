"""Tables of comma-separated text, also with semicolons or tabs between the cells."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fedsim.data.examples import DataError
from fedsim.data.tables.table import Block, check_names

_DELIMITERS = (",", ";", "\t", "|")
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class CsvTable:
    """A .csv file with a header row.

    Attributes:
        path: the file.
        names: the header.
        delimiter: what separates the cells.
        encoding: of the text, as Python names it.
    """

    path: Path
    names: tuple[str, ...]
    delimiter: str
    encoding: str

    @classmethod
    def open(cls, path: Path, *, wanted: str, encoding: str = "utf-8") -> "CsvTable":
        """Return the table, its delimiter found in the header: no other row decides it.

        Args:
            path: the file.
            wanted: a column; the first delimiter by which the header has it is taken, or else the
                one that gives most columns.
            encoding: of the text.

        Raises:
            DataError: the file cannot be read or has no usable header.
        """
        headers = {mark: _header(path, mark, encoding) for mark in _DELIMITERS}
        if not headers[","]:
            raise DataError(f"{path}: is empty; the first row must name the columns")
        has = [mark for mark, names in headers.items() if wanted in names]
        chosen = has[0] if has else max(_DELIMITERS, key=lambda mark: len(headers[mark]))
        check_names(path, headers[chosen])
        return cls(path, tuple(headers[chosen]), chosen, encoding)

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Yield the cells of some columns as text, `_BLOCK_ROWS` rows at a time.

        Raises:
            DataError: the file cannot be read, or a row has another number of cells.
        """
        wanted = [self.names.index(name) for name in columns]
        rows = islice(_rows(self.path, self.delimiter, self.encoding), 1, None)
        while taken := list(islice(rows, _BLOCK_ROWS)):
            for line, row in taken:
                self._check_width(line, row)
            cells = {self.names[index]: [row[index] for _, row in taken] for index in wanted}
            yield Block(cells, [line for line, _ in taken])

    def where(self, place: int) -> str:
        """Return the file and line of a row."""
        return f"{self.path}:{place}"

    def _check_width(self, line: int, row: list[str]) -> None:
        if len(row) != len(self.names):
            raise DataError(
                f"{self.where(line)}: a row must have {len(self.names)} cells as the header has, "
                f"got {len(row)}; fix or remove the row"
            )


def _header(path: Path, delimiter: str, encoding: str) -> list[str]:
    """Return the header by one delimiter; empty if it is none by that one."""
    try:
        return next(_rows(path, delimiter, encoding), (0, []))[1]
    except DataError:
        if delimiter == _DELIMITERS[0]:
            raise
        return []


def _rows(path: Path, delimiter: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) of the rows that are not blank."""
    form = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
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

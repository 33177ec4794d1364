"""Summaries of the cells of table columns, from which drafts of column settings are made."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.tables.column import (
    FLOAT32_MAX,
    MISSING,
    Cells,
    as_number,
    as_years,
    numbers_of_array,
    texts_of,
)
from fedsim.data.tables.settings import as_text
from fedsim.data.tables.table import Table

MAX_CATEGORIES = 20
"""Most different texts of a column that is drafted as categories."""

MAX_DISTINCT = 100_000
"""Most different texts of a column that are counted."""

_MAX_NUMERALS = MAX_CATEGORIES + 1  # different numbers whose cells are kept
_MAX_STRAYS = 5  # most different texts among numbers that are taken for missing values
_MIN_NUMBERS = 0.8  # least share of numbers in a column of numbers with such texts
_DATE_FORMATS = ("iso", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y")


class ColumnSummary:
    """Counts of the cells of a table column; `add` adds the cells of some more rows.

    Attributes:
        rows: number of cells.
        gaps: number of missing cells.
        texts: how often each text occurs that is not a number.
        numerals: how often each number occurs, by the text of its cell. At most
            `MAX_CATEGORIES` + 1 different numbers are counted.

    Args:
        decimal: the decimal mark of numbers, `.` or `,`.
    """

    def __init__(self, decimal: str = ".") -> None:
        self.rows = self.gaps = 0
        self.texts = Counter[str]()
        self.numerals = Counter[str]()
        self._decimal, self._has_dates = decimal, False
        self._values: list[NDArray[np.float64]] = [np.empty(0)]

    def add(self, cells: Cells) -> None:
        """Add the column's cells of some more rows (texts or typed values) to the counts."""
        self.rows += len(cells)
        if isinstance(cells, np.ndarray) and cells.dtype.kind not in "bO":
            self._add_array(cells)
            return
        values = list[float]()
        for cell, count in Counter(texts_of(cells)).items():
            value = as_number(cell, self._decimal)
            if cell.lower() in MISSING:
                self.gaps += count
            elif value is None:
                self._count(self.texts, {cell: count}, MAX_DISTINCT)
            else:
                self._count(self.numerals, {cell: count}, _MAX_NUMERALS)
                values.extend([value] * count)
        self._values.append(np.array(values))

    def _add_array(self, cells: NDArray[Any]) -> None:
        self._has_dates |= cells.dtype.kind == "M"
        numbers = numbers_of_array(cells)
        absent, usable = np.isnan(numbers), np.abs(numbers) <= FLOAT32_MAX
        self.gaps += int(absent.sum())
        self._values.append(numbers[usable])
        for kept, counter, limit in (
            (usable, self.numerals, _MAX_NUMERALS),
            (~usable & ~absent, self.texts, MAX_DISTINCT),
        ):
            distinct, counts = np.unique(numbers[kept], return_counts=True)
            few = islice(zip(distinct.tolist(), counts.tolist(), strict=True), limit)
            self._count(counter, {as_text(value): count for value, count in few}, limit)

    @staticmethod
    def _count(counter: Counter[str], counts: Mapping[str, int], limit: int) -> None:
        for cell, count in counts.items():
            if count and (cell in counter or len(counter) < limit):
                counter[cell] += count

    @property
    def values(self) -> NDArray[np.float64]:
        """All numbers in the column's cells, (n,); typed dates count as years with a fraction."""
        return np.concatenate(self._values)

    @property
    def is_number(self) -> bool:
        """Whether the cells are numbers, except missing cells and a few texts such as `unknown`."""
        numbers = sum(map(len, self._values))
        known = self.rows - self.gaps
        strays = len(self.texts) <= _MAX_STRAYS and numbers >= _MIN_NUMBERS * known
        return numbers > 0 and (numbers == known or strays)

    @property
    def cells(self) -> list[str]:
        """The distinct cells (only a limited number is kept): sorted numbers, then sorted texts."""
        numbers = sorted(self.numerals, key=lambda cell: as_number(cell, self._decimal) or 0.0)
        return [*numbers, *sorted(self.texts)]

    @property
    def is_complete(self) -> bool:
        """Whether `cells` has all distinct cells; if not, the column has too many to keep."""
        return len(self.numerals) < _MAX_NUMERALS and len(self.texts) < MAX_DISTINCT

    @property
    def date_format(self) -> str | None:
        """Format of the dates in the cells, `iso` or one such as `%d.%m.%Y`.

        The value is None if a cell holds something else than a date.
        """
        if self._has_dates:
            return "iso"
        if not self.texts or self.numerals:
            return None
        for form in _DATE_FORMATS:
            if all(as_years(cell, form) is not None for cell in self.texts):
                return form
        return None

    def years(self, form: str) -> NDArray[np.float64]:
        """Return the dates in the cells as years with a fraction; equal text dates count once.

        Args:
            form: the format of the dates: `iso`, or a format such as `%d.%m.%Y`.
        """
        if self._has_dates:
            return self.values
        return np.array([as_years(cell, form) for cell in self.texts], np.float64)


def summarise(
    tables: Iterable[Table], names: Sequence[str], *, decimal: str = "."
) -> dict[str, ColumnSummary]:
    """Return the summary of each column, by name, over all rows of one or several tables.

    Args:
        tables: the tables; a table that lacks a column adds nothing to that column's summary.
        names: names of the columns.
        decimal: the decimal mark of numbers, `.` or `,`.

    Raises:
        DataError: a table cannot be read.
    """
    summaries = {name: ColumnSummary(decimal) for name in names}
    for table in tables:
        present = [name for name in names if name in table.names]
        for block in table.blocks(present):
            for name in present:
                summaries[name].add(block.cells[name])
    return summaries


def has_decimal_commas(summaries: Mapping[str, ColumnSummary]) -> bool:
    """Whether in some column all texts are numbers with a decimal comma, such as 0,5."""
    return any(
        summary.texts and all(as_number(cell, ",") is not None for cell in summary.texts)
        for summary in summaries.values()
    )

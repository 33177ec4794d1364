"""The targets of tables: classes of text or of whole numbers, or numbers for regression."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.examples import DataError
from fedsim.data.tables.column import CellError, Cells, Column, as_number

_WHOLE = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True)
class TargetCells:
    """The target column of some tables of one kind, one after another.

    Attributes:
        name: name of the column.
        cells: n cells as text, or n typed values.
        where: returns the place of a row in words, for messages.
        decimal: the decimal mark of numbers.
    """

    name: str
    cells: Cells
    where: Callable[[int], str]
    decimal: str = "."

    def values(self, column: Column | None = None) -> NDArray[Any] | list[str]:
        """Return the targets (n,).

        | cells                                           | targets                          |
        |-------------------------------------------------|----------------------------------|
        | any, where `column` lists classes               | their numbers in that list       |
        | all text                                        | the text                         |
        | all whole numbers from 0, without decimal point | classes with these numbers       |
        | other numbers                                   | real numbers for regression      |

        The type of typed values decides for them.

        Args:
            column: settings of the target, with classes; None: it has none.

        Raises:
            DataError: a cell is missing, or is no number where others are.
        """
        if column is not None:
            try:
                return column.numbers(self.cells).astype(np.int64)
            except CellError as error:
                raise self._mistake(error.row, str(error)) from error
        return self._of_array(self.cells) if isinstance(self.cells, np.ndarray) else self._of_text()

    def _of_array(self, cells: NDArray[Any]) -> NDArray[Any]:
        missing = np.flatnonzero(np.isnan(cells)) if cells.dtype.kind == "f" else np.array([])
        if missing.size:
            raise self._mistake(
                int(missing[0]), "the cell is empty; fix the cell or remove the row"
            )
        return cells

    def _of_text(self) -> NDArray[Any] | list[str]:
        cells = list(self.cells)
        if "" in cells:
            fix = "the cell is empty; fix the cell or remove the row"
            raise self._mistake(cells.index(""), fix)
        values = [as_number(cell, self.decimal) for cell in cells]
        text = [row for row, value in enumerate(values) if value is None]
        if len(text) == len(cells):
            return cells
        if text:  # a stray "NA" must not turn every number into a class name
            raise self._mistake(
                text[0],
                f"{cells[text[0]]!r} is not a finite number but other targets are; fix or remove "
                "the row, or write every class as text",
            )
        if all(_WHOLE.fullmatch(cell) and len(cell) <= 18 for cell in cells):
            return np.array([int(cell) for cell in cells], dtype=np.int64)
        return np.array(values, dtype=np.float64)

    def _mistake(self, row: int, problem: str) -> DataError:
        return DataError(f"{self.where(row)}: column {self.name!r}: {problem}")

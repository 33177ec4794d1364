"""Conversion of one table column: cells become numbers, and numbers become features or targets."""

import re
from calendar import isleap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.names import closest_name
from fedsim.data.file_names import MAX_CHARS, MAX_NAMES, quoted
from fedsim.data.tables.settings import ColumnSettings, as_text

_FIX = "fix the cell or remove the row"
_MAX_KNOWN = 1 << 16  # most cells of a column whose numbers are cached
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
FLOAT32_MAX = float(np.finfo(np.float32).max)
_WHOLE = re.compile(r"\d+", re.ASCII)
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}")
_MAX_CHARS = 60  # of a cell in a message

Cells = Sequence[str] | NDArray[Any]


class CellError(ValueError):
    """Raised for a cell that cannot be used; `row` is the index of the cell in its column."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


@dataclass(frozen=True)
class Column:
    """A column of a table, with the rule that turns its cells into features.

    Guarantee: the features of a cell are a function of the cell and the settings.

    Attributes:
        name: the column's name in the header.
        settings: the column's settings, with its public constants.
        is_listed: whether the experiment file lists the column; messages depend on it.
        decimal: the decimal mark of numbers, `.` or `,`.
        is_target: whether the column is the target, whose cells are never filled.
    """

    name: str
    settings: ColumnSettings
    is_listed: bool
    decimal: str = "."
    is_target: bool = False

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column gives."""
        return self.settings.feature_names(self.name)

    def numbers(self, cells: Cells) -> NDArray[np.float64]:
        """Return cells as numbers (values, years, or class numbers), float64 (n,) without NaN.

        Args:
            cells: n cells as text, or n typed values (numbers with NaN for missing cells,
                datetime64).

        Raises:
            CellError: a cell is missing and the settings have no `fill`, or a cell is not a number.
        """
        numbers = self._numbers(cells)
        above = self.settings.above
        return numbers if above is None else (numbers > above).astype(np.float64)

    def _numbers(self, cells: Cells) -> NDArray[np.float64]:
        if isinstance(cells, np.ndarray) and self.settings.classes is None:
            return self._of_array(cells)
        texts = texts_of(cells)
        if self._is_plain:  # several times as fast for a column of numbers
            values = [as_number(text, self.decimal) for text in texts]
            if None not in values:
                return np.array(values, np.float64)
        known: dict[str, float] = {}
        result = np.empty(len(texts))
        for row, text in enumerate(texts):
            value = known.get(text)
            if value is None:
                value = known[text] = self._number(text, row)
                if len(known) > _MAX_KNOWN:
                    known.clear()
            result[row] = value
        return result

    def targets(self, cells: Cells) -> NDArray[Any] | list[str]:
        """Return the targets (n,) that the cells of the target column stand for.

        | cells                                           | targets                          |
        |-------------------------------------------------|----------------------------------|
        | any, if the experiment lists the classes        | class numbers, in listed order   |
        | all text, none of it a mark of missing values   | the text                         |
        | all whole numbers from 0, without decimal point | classes with these numbers       |
        | other numbers                                   | real numbers for regression      |

        Typed values (from a .parquet file) keep their type.

        Raises:
            CellError: a cell is missing, or is not a number while others are.
        """
        if self.is_listed:
            return self.numbers(cells).astype(np.int64)
        if isinstance(cells, np.ndarray):
            absent = np.isnan(numbers_of_array(cells))
            if absent.any():
                raise CellError(int(absent.argmax()), f"the cell is empty; {_FIX}")
            return cells
        if "" in cells:
            raise CellError(cells.index(""), f"the cell is empty; {_FIX}")
        values = [as_number(cell, self.decimal) for cell in cells]
        text = [row for row, value in enumerate(values) if value is None]
        if len(text) == len(cells):
            absent = next((row for row in text if cells[row].lower() in MISSING), None)
            if absent is not None:
                fix = f"{_FIX}, or if it is a class, set {self._listed('classes: [...]')}"
                raise CellError(absent, f"{_shown(cells[absent])} is a missing value; {fix}")
            return list(cells)
        if text:  # a stray "NA" must not turn every number into a class name
            raise CellError(
                text[0],
                f"{cells[text[0]]!r} is not a finite number but other targets are; fix or remove "
                "the row, or write every class as text",
            )
        if all(_WHOLE.fullmatch(cell) and len(cell) <= 18 for cell in cells):
            return np.array([int(cell) for cell in cells], dtype=np.int64)
        return np.array(values, dtype=np.float64)

    def features(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the features (n, k) of n cells, given the numbers (n,) that `numbers` returned."""
        settings = self.settings
        if settings.class_names is not None:
            return np.eye(len(settings.class_names))[numbers.astype(np.int64)]
        if settings.range is not None:
            numbers = np.clip(numbers, settings.range[0], settings.range[1])
        numbers, bounds = (
            _logged(numbers, settings),
            _logged(np.array(settings.range or [0.0, 1.0]), settings),
        )
        if settings.range is not None:
            numbers = (numbers - bounds[0]) / (bounds[1] - bounds[0])
        return numbers[:, None]

    def _of_array(self, cells: NDArray[Any]) -> NDArray[np.float64]:
        numbers = numbers_of_array(cells)
        absent = np.isnan(numbers)
        for value in self._missing_numbers:
            absent |= numbers == value
        if absent.any():
            numbers = np.where(absent, self._filled("", int(absent.argmax())), numbers)
        wrong = np.flatnonzero(~(np.abs(numbers) <= FLOAT32_MAX))
        if wrong.size:
            raise CellError(int(wrong[0]), f"{cells[wrong[0]]} is not a finite number; {_FIX}")
        return numbers

    def _number(self, cell: str, row: int) -> float:
        """Return the number of one cell; `row` is the cell's index for messages."""
        classes = self._class_numbers
        if cell in self._missing:
            return self._filled(cell, row)
        if cell in classes:
            return classes[cell]
        if cell.lower() in MISSING and (self.is_listed or not cell):
            return self._filled(cell, row)
        if classes:
            return self._other(cell, row)
        form = self.settings.date
        value = as_number(cell, self.decimal, inf) if form is None else as_years(cell, form)
        if value in self._missing_numbers:
            return self._filled(cell, row)
        if value is None or abs(value) > FLOAT32_MAX:
            raise CellError(row, self._problem(cell))
        return value

    def _filled(self, cell: str, row: int) -> float:
        fill, classes = self.settings.fill, self._class_numbers
        if fill is not None:
            return self._names[as_text(fill)] if classes else float(fill)
        problem = "the cell is empty" if not cell else f"{_shown(cell)} is a missing value"
        value = "one of its classes" if classes else "0"
        hint = "" if self.is_target else f", or set {self._listed(f'fill: {value}')}"
        raise CellError(row, f"{problem}; {_FIX}{hint}")

    def _other(self, cell: str, row: int) -> float:
        if self.settings.other is not None:
            return self._names[as_text(self.settings.other)]
        cells = list(self._class_numbers)
        close = closest_name(cell[:MAX_CHARS], cells[:MAX_NAMES])
        hint = "" if close is None else f"did you mean {close!r}? "
        other = "" if self.is_target else f", or set other: {list(self._names)[-1]}"
        raise CellError(
            row,
            f"{_shown(cell)} is not one of the classes {quoted(cells[:10])}; {hint}add it to "
            f"classes{other}",
        )

    def _problem(self, cell: str) -> str:
        form = self.settings.date
        if form is not None:
            example = "an ISO date such as 2024-03-31" if form == "iso" else f"a date as {form}"
            return f"{_shown(cell)} is not {example}; {_FIX}, or change date"
        problem = f"{_shown(cell)} is not a finite number"
        if cell.lower() in MISSING:
            return f"{problem}; {_FIX}, or set {self._listed('fill: 0')}"
        other = "," if self.decimal == "." else "."
        if as_number(cell, other) is not None:
            mark = f"with the decimal mark {self.decimal!r}"
            return f"{problem} {mark}; set data.dataset.decimal: {other!r}"
        if _DATE.match(cell) and not self.is_listed:
            return f"{problem}; {_FIX}, or set {self._listed('date: iso')}, or a format as %d.%m.%Y"
        if cell[:1].isdigit() or cell[:1] in "+-" or self.is_listed or cell[1:2] == "_":
            return f"{problem}; {_FIX}"
        return f"{problem}; {_FIX}, or set {self._listed('classes: [...]')}, or {self.name}: drop"

    @cached_property
    def _class_numbers(self) -> dict[str, float]:
        """The class number of each listed cell; empty for a column of numbers."""
        classes = self.settings.classes or []
        groups = classes.values() if isinstance(classes, dict) else ([cell] for cell in classes)
        return {as_text(cell): float(i) for i, group in enumerate(groups) for cell in group}

    @cached_property
    def _names(self) -> dict[str, float]:
        """The number of each class by its name."""
        return {name: float(i) for i, name in enumerate(self.settings.class_names or ())}

    @property
    def _is_plain(self) -> bool:
        """Whether every cell that has a number means that number."""
        return not (self.settings.classes or self.settings.date or self.settings.missing)

    @cached_property
    def _missing(self) -> frozenset[str]:
        return frozenset(as_text(cell) for cell in self.settings.missing)

    @cached_property
    def _missing_numbers(self) -> frozenset[float]:
        numbers = (as_number(cell, largest=inf) for cell in self._missing)
        return frozenset(number for number in numbers if number is not None)

    def _listed(self, setting: str) -> str:
        return f"data.dataset.columns: {{{self.name}: {{{setting}}}}}"


def _logged(numbers: NDArray[np.float64], settings: ColumnSettings) -> NDArray[np.float64]:
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if settings.log else numbers


def texts_of(cells: Cells) -> Sequence[str]:
    """Return the cells as text; typed values become the text of a .csv cell, "" if missing."""
    if not isinstance(cells, np.ndarray):
        return cells
    return ["" if cell is None or cell != cell else as_text(cell) for cell in cells.tolist()]


def as_number(cell: str, decimal: str = ".", largest: float = FLOAT32_MAX) -> float | None:
    """Return the number in a cell; None if the text is not a float32 number.

    Args:
        cell: the text of the cell; digits with underscores (1_000) are not a number.
        decimal: the decimal mark, `.` or `,`.
        largest: largest absolute value of a number.
    """
    if decimal != ".":
        cell = "" if "." in cell else cell.replace(decimal, ".", 1)
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= largest and "_" not in cell else None


def as_years(cell: str, form: str) -> float | None:
    """Return the date in a cell as a year with a fraction; None if it is not a date of this form.

    Args:
        cell: the text of the cell.
        form: iso, or a format such as %d.%m.%Y.
    """
    try:
        date = datetime.fromisoformat(cell) if form == "iso" else datetime.strptime(cell, form)
    except (ValueError, re.error):  # %d%d is no pattern
        return None
    start = datetime(date.year, 1, 1, tzinfo=date.tzinfo)
    days = (date - start).total_seconds() / 86_400
    return date.year + days / (366 if isleap(date.year) else 365)


def numbers_of_array(cells: NDArray[Any]) -> NDArray[np.float64]:
    """Return typed cells (n,) as numbers, dates as years with a fraction; NaN if missing."""
    if cells.dtype.kind != "M":
        return cells.astype(np.float64)
    years = cells.astype("datetime64[Y]")
    start = years.astype("datetime64[us]")
    length = (years + 1).astype("datetime64[us]") - start
    numbers = years.astype(np.int64) + 1970 + (cells.astype("datetime64[us]") - start) / length
    return np.where(np.isnat(cells), np.nan, numbers)


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= _MAX_CHARS else f"{cell[:_MAX_CHARS]}...")

"""Reading of JSON and YAML with one-line errors, and writing of CSV that is safe in spreadsheets.

JSON must not contain infinity or NaN. Files are read strictly, as anyone may have written them.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import yaml

_Text = TypeVar("_Text")


class FormatError(ValueError):
    """Raised for text that is not valid JSON or YAML; the message has one line."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        FormatError: the text is not valid JSON, or nested too deeply.
    """
    return _parse(json.loads, text)


def parse_plain_yaml(text: str) -> Any:
    """Return the value of a YAML text that may come from another tool.

    Raises:
        FormatError: the text is not valid YAML, or nested too deeply.
    """
    return _parse(yaml.safe_load, text)


def _parse(parse: Callable[[_Text], Any], text: _Text) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise FormatError("nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date, a number
        message = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(message) from error


def is_finite(content: object) -> bool:
    """Whether parsed JSON can be written again: not with NaN or infinity, which Python reads."""
    try:
        json.dumps(content, allow_nan=False)
    except (RecursionError, ValueError):
        return False
    return True


def json_value(value: Any) -> Any:
    """Return a value as JSON: a dataclass as a mapping, an infinite or undefined number as null."""
    from pydantic_core import to_jsonable_python  # takes longer than the rest of this module

    return to_jsonable_python(value, inf_nan_mode="null")


def finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None (null in JSON) if it is infinite, NaN or None."""
    return None if value is None or not math.isfinite(value) else value


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV text.

    A spreadsheet runs text that begins with = + - @, a tab or a carriage return as a formula. Such
    text gets an apostrophe in front, unless it is a number.

    Args:
        columns: names of the columns.
        rows: the cells of each row; None is an empty cell.
    """
    lines = _Lines()
    writer = csv.writer(lines)
    writer.writerow(map(_plain, columns))
    writer.writerows(map(_plain, row) for row in rows)
    return "".join(lines)


class _Lines(list[str]):
    """Collects lines that end in a line feed; `csv` itself would not quote a carriage return."""

    def write(self, line: str) -> None:
        self.append(f"{line[:-2]}\n")


def _plain(cell: object) -> object:
    if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) and not _is_number(cell):
        return f"'{cell}"
    return cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text[0].isspace()

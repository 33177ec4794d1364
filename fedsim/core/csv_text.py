"""CSV that a spreadsheet shows as it is: no cell of text is taken for a formula."""

import csv
from collections.abc import Iterable

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV.

    A spreadsheet runs text that begins with = + - @, a tab or a carriage return. Such text gets an
    apostrophe in front, and numbers stay numbers, also as text.

    Args:
        columns: names of the columns.
        rows: their cells; None is an empty cell.
    """
    lines = _Lines()
    writer = csv.writer(lines)
    writer.writerow(map(_plain, columns))
    writer.writerows(map(_plain, row) for row in rows)
    return "".join(lines)


class _Lines(list[str]):
    """Lines with a line feed alone; `csv` itself would leave a carriage return without quotes."""

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

"""Shares of clients and classes as shaded cells, as inline SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedsim.report.chart import Chart, Point, Scale, Tip, width_of

MAX_NAMED_ROWS = 40  # with more clients, rows are thin and have no number

_LEVELS = 8  # shades: the cells of one shade are one path of the drawing
_STRONGEST = 0.45  # opacity of a full cell: text on it stays legible, light and dark
_ROW_PIXELS, _COLUMN_PIXELS = 20, 30
_THIN_ROWS_PIXELS = 380  # all of them together
_WIDTH_PIXELS = (330, 640)
_MIN_TEXT_PIXELS = 27  # width of a cell with a number in it
_MAX_TICKS = 16
_MAX_TEXT_CHARACTERS = 9


@dataclass(frozen=True)
class HeatMap:
    """A table of shares.

    Attributes:
        label: what it is, in words.
        shares: of each row, one share in [0, 1] for each column; None: an empty cell.
        texts: of each row, what is written in a cell where there is room.
        rows: name of each row.
        columns: name of each column.
        tips: a text for each row.
        below: what the columns are.
        beside: what the rows are.
    """

    label: str
    shares: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    rows: Sequence[str]
    columns: Sequence[str]
    tips: Sequence[str]
    below: str
    beside: str


def draw_heat_map(heat_map: HeatMap) -> Markup:
    """Return the table as inline SVG."""
    count, size = len(heat_map.rows), len(heat_map.columns)
    named = count <= MAX_NAMED_ROWS
    rows = {row + 0.5: _short(name) for row, name in enumerate(heat_map.rows) if named}
    stride = -(-size // _MAX_TICKS)
    columns = {k + 0.5: _short(heat_map.columns[k]) for k in range(0, size, stride)}
    upright = (
        sum(map(len, columns.values())) > 4 * _MAX_TICKS or max(map(len, columns.values())) > 4
    )
    left, (least, most) = 25 + width_of(rows.values()), _WIDTH_PIXELS
    width = min(max(left + 8 + size * _COLUMN_PIXELS, least), most)
    inside = count * _ROW_PIXELS if named else _THIN_ROWS_PIXELS
    below = 24 + (width_of(columns.values()) if upright else 14)
    x, y = Scale(0.0, size, left, width - 8), Scale(0.0, count, 4, 4 + inside)
    chart = Chart(width, y.end + below, x, y)
    _shade(chart, heat_map.shares)
    if named and (width - left) / size >= _MIN_TEXT_PIXELS:
        _write(chart, heat_map.texts)
    chart.left_axis(rows, heat_map.beside, grid=False)
    chart.bottom_axis(columns, heat_map.below, turned=upright)
    tips = [Tip(0, row + 0.5, text) for row, text in enumerate(heat_map.tips)]
    return chart.svg(heat_map.label, tips, across=True)


def _shade(chart: Chart, shares: Sequence[Sequence[float | None]]) -> None:
    cells: dict[int, list[Point]] = {}
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share is not None:
                level = max(1, round(share * _LEVELS))  # a share of 0 is not an empty cell
                corners = [(0, 0), (1, 0), (1, 1), (0, 1), (0, math.nan)]
                cells.setdefault(level, []).extend((column + x, row + y) for x, y in corners)
    for level, corners in sorted(cells.items()):
        chart.area(corners, "accent", _STRONGEST * level / _LEVELS)


def _write(chart: Chart, texts: Sequence[Sequence[str]]) -> None:
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if text:
                chart.write(text, (column + 0.5, row + 0.5), anchor="middle", size=9.5)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARACTERS else text[: _MAX_TEXT_CHARACTERS - 1] + "…"

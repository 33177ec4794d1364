"""Shares of clients and classes as shaded cells. Imports matplotlib, so import it when drawing."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from fedsim.report.svg import Ink, Tip, inline_svg, style

MAX_NAMED_ROWS = 40  # with more clients, rows are thin and have no number

_LEVELS = 8  # shades: the cells of one shade are one path of the drawing
_STRONGEST = 0.45  # opacity of a full cell: text on it stays legible, light and dark
_ROW_PIXELS, _COLUMN_PIXELS = 20, 30
_THIN_ROWS_PIXELS = 380  # all of them together
_MARGIN_PIXELS = (70, 62)  # of axes: left and right, top and bottom
_WIDTH_PIXELS = (330, 640)
_MIN_TEXT_PIXELS = 27  # width of a cell with a number in it
_MAX_TICKS = 16
_MAX_TEXT_CHARACTERS = 9


@dataclass(frozen=True)
class HeatMap:
    """A table of shares.

    Attributes:
        name: unique in the page.
        label: what it is, in words.
        shares: of each row, one share in [0, 1] for each column; None: an empty cell.
        texts: of each row, what is written in a cell where there is room.
        rows: name of each row.
        columns: name of each column.
        tips: a text for each row.
        below: what the columns are.
        beside: what the rows are.
    """

    name: str
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
    least, most = _WIDTH_PIXELS
    width = min(max(_MARGIN_PIXELS[0] + size * _COLUMN_PIXELS, least), most)
    inside = count * _ROW_PIXELS if count <= MAX_NAMED_ROWS else _THIN_ROWS_PIXELS
    with style():
        figure = Figure(
            figsize=(width / 72, (inside + _MARGIN_PIXELS[1]) / 72), layout="constrained"
        )
        axes = figure.add_subplot()
        _shade(axes, heat_map.shares)
        cell_pixels = (width - _MARGIN_PIXELS[0]) / size
        if count <= MAX_NAMED_ROWS and cell_pixels >= _MIN_TEXT_PIXELS:
            _write(axes, heat_map.texts)
        _name_axes(axes, heat_map)
        tips = [Tip(0, row + 0.5, text) for row, text in enumerate(heat_map.tips)]
        return inline_svg(
            figure, name=heat_map.name, label=heat_map.label, axes=axes, strips=tips, across=True
        )


def _shade(axes: Axes, shares: Sequence[Sequence[float | None]]) -> None:
    cells: dict[int, list[Path]] = {}
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share is not None:
                level = max(1, round(share * _LEVELS))  # a share of 0 is not an empty cell
                corners = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]
                moved = [(column + x, row + y) for x, y in corners]
                cells.setdefault(level, []).append(Path(moved, closed=True))
    for level, paths in sorted(cells.items()):
        opacity = _STRONGEST * level / _LEVELS
        whole = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(whole, facecolor=Ink.ACCENT, alpha=opacity, linewidth=0))


def _write(axes: Axes, texts: Sequence[Sequence[str]]) -> None:
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if text:
                place = (column + 0.5, row + 0.5)
                axes.annotate(
                    text, place, ha="center", va="center_baseline", fontsize=9.5, color=Ink.TEXT
                )


def _name_axes(axes: Axes, heat_map: HeatMap) -> None:
    count, size = len(heat_map.rows), len(heat_map.columns)
    stride = -(-size // _MAX_TICKS)
    shown = range(0, size, stride)
    names = [_short(heat_map.columns[place]) for place in shown]
    upright = sum(len(name) for name in names) > 4 * _MAX_TICKS or max(map(len, names)) > 4
    axes.set_xticks([place + 0.5 for place in shown], names, rotation=90 if upright else 0)
    if count <= MAX_NAMED_ROWS:
        axes.set_yticks([row + 0.5 for row in range(count)], [_short(row) for row in heat_map.rows])
    else:
        axes.set_yticks([])
    axes.set_xlim(0, size)
    axes.set_ylim(count, 0)
    axes.set_xlabel(heat_map.below)
    axes.set_ylabel(heat_map.beside)
    axes.tick_params(length=0)
    axes.grid(False)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARACTERS else text[: _MAX_TEXT_CHARACTERS - 1] + "…"

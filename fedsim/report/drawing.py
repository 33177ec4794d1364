"""Drawing of a chart as SVG for a page, or as an SVG, PNG or PDF file.

No library for figures is used, since importing one takes longer than a short run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedsim.core.errors import InputError
from fedsim.report.chart import LINE_PIXELS, SERIES, Area, Chart, Dots, Ink, Line, Mark, Note, Point

_SMALL_PIXELS = 11.0
_CORNERS = {  # corners of each symbol, in units of its radius; "o" is a circle
    "s": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "^": ((-1, 1), (1, 1), (0, -1)),
    "D": ((-1.2, 0), (0, -1.2), (1.2, 0), (0, 1.2)),
    "v": ((-1, -1), (1, -1), (0, 1)),
    "<": ((1, -1), (1, 1), (-1, 0)),
    ">": ((-1, -1), (-1, 1), (1, 0)),
    "_": ((-1, -0.2), (1, -0.2), (1, 0.2), (-1, 0.2)),
    "|": ((-0.2, -1), (-0.2, 1), (0.2, 1), (0.2, -1)),
}


class _Layout:
    """Converts the values of a chart into pixels."""

    def __init__(self, chart: Chart) -> None:
        self._chart, self._left, (self._end, self._right) = chart, chart.y.room, chart.ends
        self._top, self._bottom = chart.top, chart.top + chart.height

    def placed(self) -> Iterator[Mark]:
        """Yield the axes and all marks with points in pixels."""
        yield from self._left_axis()
        yield from self._bottom_axis()
        for mark in self._chart.marks:
            if isinstance(mark, Note):
                (x, y), (right, down) = self._place(mark.point), mark.offset
                yield replace(mark, point=(x + right, y + down))
            else:
                yield replace(mark, points=[self._place(point) for point in mark.points])
        yield from self._names()

    def strips(self) -> Iterator[tuple[Point, Point, str]]:
        """Yield for each tooltip the strip that is nearest to its value: (corner, size, text)."""
        left, right, top, bottom = self._left, self._right, self._top, self._bottom
        tips, across = self._chart.tips, self._chart.across
        points = [(math.inf, value) if across else (value, math.inf) for value, _ in tips]
        places = [self._place(point)[across] for point in points]
        low, high = (top, bottom) if across else (left, right)
        edges = [low, *((before + after) / 2 for before, after in pairwise(places)), high]
        for (start, end), (_, text) in zip(pairwise(edges), tips, strict=False):
            size = max(0.0, end - start)
            if across:
                yield (left, start), (right - left, size), text
            else:
                yield (start, top), (size, bottom - top), text

    def _left_axis(self) -> Iterator[Mark]:
        axis = self._chart.y
        for value, words in axis.marks.items():
            _, y = self._place((math.inf, value))
            if axis.grid:
                yield _rule((self._left, y), (self._right, y))
            yield Note(words, (self._left - 5, y), ink="muted", anchor="end", size=_SMALL_PIXELS)
        if axis.label:
            place, turned = (8, (self._top + self._bottom) / 2), len(axis.label) > 1
            yield Note(axis.label, place, ink="muted", anchor="middle", turned=turned)

    def _bottom_axis(self) -> Iterator[Mark]:
        axis, y = self._chart.x, self._bottom
        yield _rule((self._left, y), (self._right, y))
        for value, words in axis.marks.items():
            x, _ = self._place((value, math.inf))
            note = Note(words, (x, y + 12), ink="muted", anchor="middle", size=_SMALL_PIXELS)
            if axis.upright:
                yield replace(note, point=(x, y + 6), anchor="end", turned=True)
            else:
                yield _rule((x, self._top if axis.grid else y), (x, y + 3))
                yield note
        place = ((self._left + self._right) / 2, self._chart.total_height - 8)
        yield Note(axis.label, place, ink="muted", anchor="middle")

    def _names(self) -> Iterator[Note]:
        """Yield the names beside the last points of lines, without overlaps."""
        places = [(self._place(point), name, ink) for name, point, ink in self._chart.names]
        places.sort(key=lambda entry: entry[0][1])
        heights = _apart([y for (_, y), _, _ in places])
        for ((x, _), name, ink), y in zip(places, heights, strict=True):
            yield Note(name, (x + 9, y), ink=ink)

    def _place(self, point: Point) -> Point:
        """Return a point in pixels; an infinite coordinate is the edge of the chart."""
        (x, y), across, up = point, self._chart.x, self._chart.y
        if math.isinf(x):
            place = self._left if x < 0 else self._right
        else:
            place = self._left + across.share(x) * (self._end - self._left)
        if math.isinf(y):
            return place, self._bottom if y < 0 else self._top
        return place, self._bottom + up.share(y) * (self._top - self._bottom)


def _apart(heights: Sequence[float]) -> list[float]:
    """Return heights moved apart to at least `LINE_PIXELS`, as little as groups allow."""
    groups: list[tuple[float, int]] = []  # centre and number of names that stand together
    for centre in heights:
        count = 1
        while groups and centre - groups[-1][0] < LINE_PIXELS * (groups[-1][1] + count) / 2:
            low, few = groups.pop()
            centre, count = (low * few + centre * count) / (few + count), few + count
        groups.append((centre, count))
    return [
        centre + LINE_PIXELS * (index - (count - 1) / 2)
        for centre, count in groups
        for index in range(count)
    ]


def _rule(start: Point, end: Point) -> Line:
    return Line([start, end], "line", 0.8)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points as lists without gaps, split at each point that is NaN."""
    groups = groupby(points, key=lambda point: math.isnan(point[1]))
    return [list(run) for is_gap, run in groups if not is_gap]


def inline_svg(chart: Chart) -> Markup:
    """Return a chart as an `<svg>` element, in the colours and the font of the page."""
    layout = _Layout(chart)
    opening = (
        f'<svg class="plot" viewBox="0 0 {chart.width:.0f} {chart.total_height:.0f}" fill="none" '
        f'stroke-linejoin="round" role="img" aria-label="{escape(chart.label)}">'
    )
    strips = "".join(
        f'<rect class="tip" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(tip)}</title></rect>"
        for (x, y), (width, height), tip in layout.strips()
    )
    parts = _elements(layout.placed(), lambda ink: f"var(--{ink})")
    return Markup("\n".join([opening, *parts, f"<g>{strips}</g>", "</svg>"]))


def _elements(marks: Iterator[Mark], paint: Callable[[Ink], str]) -> Iterator[str]:
    """Yield the SVG elements for marks in pixels."""
    for mark in marks:
        colour = paint(mark.ink)
        if isinstance(mark, Note):
            yield _text(mark, colour)
            continue
        faint = f"; opacity: {mark.opacity:.3g}" if mark.opacity < 1 else ""
        if isinstance(mark, Line):
            dash = f"; stroke-dasharray: {mark.dash}" if mark.dash else ""
            style = f"stroke: {colour}; stroke-width: {mark.width}{dash}{faint}"
            yield _element(f'path d="{_path(mark.points)}"', style, mark.tip)
        elif isinstance(mark, Area):
            yield _element(f'path d="{_path(mark.points)}"', f"fill: {colour}{faint}")
        else:
            style = f"{'stroke' if mark.hollow else 'fill'}: {colour}{faint}"
            for index, point in enumerate(mark.points):
                tip = mark.tips[index] if mark.tips else ""
                yield _element(_symbol(point, mark.symbol, mark.radius), style, tip)


def _element(form: str, style: str, tip: str = "") -> str:
    inside = f"><title>{escape(tip)}</title></{form.split()[0]}>" if tip else "/>"
    return f'<{form} style="{style}"{inside}'


def _path(points: Sequence[Point]) -> str:
    return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in _runs(points))


def _symbol(point: Point, symbol: str, radius: float) -> str:
    x, y = point
    if symbol == "o":
        return f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'path d="{_path([(x + radius * dx, y + radius * dy) for dx, dy in _CORNERS[symbol]])}"'


def _text(note: Note, colour: str) -> str:
    (x, y), size = note.point, note.size
    bold = "; font-weight: bold" if note.bold else ""
    style = f"font-size: {size}px; fill: {colour}; text-anchor: {note.anchor}{bold}"
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if note.turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" dy="{0.35 * size:.1f}"'
    return f'<text {place} style="{style}"{turn}>{escape(note.words)}</text>'


_SERIES = "#1d5bb8 #b35300 #1a7046 #8a3fb0 #b3261e #0a6f7d #74502f #59616b"
_PAPER = {  # colours of the light page (style.html.jinja and comparison.html.jinja), for files
    "text": "#1b1f24",
    "muted": "#5a626c",
    "line": "#e2e3e0",
    "accent": "#1d5bb8",
    "bar": "#c3d3ec",
    **dict(zip(SERIES, _SERIES.split(), strict=True)),
}
_FONT = "DejaVu Sans"
_MAX_LEGEND_ROWS = 12
_DPI = 200


def check_chart_path(path: Path) -> Path:
    """Return the path of a chart file; another suffix than .svg, .png and .pdf is an InputError."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"a plot is a .svg, .png or .pdf file, got {path.name!r}")
    return path


@dataclass(frozen=True, repr=False)
class ChartFigure:
    """A chart that a notebook displays as its result, and that can be saved to a file."""

    chart: Chart

    def save(self, path: str | Path) -> None:
        """Save the figure as an .svg, .png or .pdf file (else: InputError), in colours on white."""
        chart, path = self.chart, check_chart_path(Path(path))
        if path.suffix == ".svg":
            path.write_text(file_svg(chart), encoding="utf-8")
            return
        import matplotlib
        import matplotlib.style
        from matplotlib.figure import Figure

        with matplotlib.style.context("default"), matplotlib.rc_context({"font.family": _FONT}):
            top, height = _sheet(chart)
            figure = Figure(figsize=(chart.width / 72, height / 72))
            axes = figure.add_axes((0, 0, 1, 1), xlim=(0, chart.width), ylim=(top + height, top))
            axes.set_axis_off()
            axes.set_autoscale_on(False)
            for mark in _with_words(chart):
                _add_to(axes, mark)
            date = {"CreationDate": None} if path.suffix == ".pdf" else {}
            figure.savefig(path, dpi=_DPI, metadata={"Title": chart.label, **date})

    def __repr__(self) -> str:
        return f"ChartFigure({self.chart.label})"

    def _repr_svg_(self) -> str:
        """Return the figure as SVG, for notebooks."""
        return file_svg(self.chart)


def file_svg(chart: Chart) -> str:
    """Return a chart as the text of an SVG file, in fixed colours on white."""
    (top, height), width = _sheet(chart), f"{chart.width:.0f}"
    parts = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height:.0f}pt" '
        f'viewBox="0 {top:.0f} {width} {height:.0f}" fill="none" stroke-linejoin="round" '
        f"font-family=\"'{_FONT}', sans-serif\">",
        f"<title>{escape(chart.label)}</title>",
        f'<rect y="{top:.0f}" width="100%" height="100%" style="fill: #ffffff"/>',
        *_elements(_with_words(chart), _PAPER.__getitem__),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _sheet(chart: Chart) -> Point:
    """Return the top and the height in pixels of a file with chart, heading and legend."""
    above = LINE_PIXELS * len(chart.heading.splitlines())
    below = LINE_PIXELS * min(len(chart.legend), _MAX_LEGEND_ROWS)
    return -above, above + chart.total_height + below


def _with_words(chart: Chart) -> Iterator[Mark]:
    """Yield all marks of a chart file in pixels, with heading and legend."""
    top, _ = _sheet(chart)
    for row, words in enumerate(chart.heading.splitlines()):
        yield Note(words, (8, top + LINE_PIXELS * (row + 0.7)))
    yield from _Layout(chart).placed()
    column = chart.width / max(1, -(-len(chart.legend) // _MAX_LEGEND_ROWS))
    for number, (name, look) in enumerate(chart.legend.items()):
        x = 8 + column * (number // _MAX_LEGEND_ROWS)
        y = chart.total_height + LINE_PIXELS * (number % _MAX_LEGEND_ROWS + 0.4)
        yield Line([(x, y), (x + 24, y)], look.ink, dash=look.dash)
        if look.symbol:
            yield Dots([(x + 12, y)], look.ink, look.symbol, 3.0)
        yield Note(name, (x + 32, y))


def _add_to(axes: Any, mark: Mark) -> None:
    """Draw a mark in pixels into matplotlib axes whose units are pixels."""
    colour = _PAPER[mark.ink]
    if isinstance(mark, Note):
        (x, y), down, turned = mark.point, 0.35 * mark.size, mark.turned
        axes.text(
            *((x + down, y) if turned else (x, y + down)),
            mark.words,
            size=mark.size,
            color=colour,
            weight="bold" if mark.bold else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            va="baseline",
            rotation=90 if turned else 0,
            rotation_mode="anchor",
            parse_math=False,  # a dollar sign in a user's name begins no formula
        )
        return
    look: dict[str, Any] = {"color": colour, "alpha": mark.opacity}
    if isinstance(mark, Area):
        for run in _runs(mark.points):
            axes.fill(*zip(*run, strict=True), lw=0, **look)
    elif isinstance(mark, Line):
        dashes = tuple(float(dash) / mark.width for dash in mark.dash.split())
        look |= {"lw": mark.width, "ls": (0, dashes) if dashes else "-"}
        axes.plot(*zip(*mark.points, strict=True), **look)
    else:
        look |= {"ls": "none", "marker": mark.symbol, "ms": 2 * mark.radius}
        look |= {"mfc": "none"} if mark.hollow else {"mew": 1.6 if mark.symbol in "_|" else 0}
        axes.plot(*zip(*mark.points, strict=True), **look)

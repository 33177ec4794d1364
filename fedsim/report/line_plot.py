"""Lines over a common axis, each with its name at its end, as a file of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fedsim.report.line_names import name_lines
from fedsim.report.svg import Ink, save_figure, style

_INCHES = (7.0, 4.4)
_MAX_MARKS = 60  # points beyond which a line has none
_MAX_PLAIN = 100_000.0  # numbers beyond are powers of ten


@dataclass(frozen=True)
class LinePlot:
    """Lines to draw.

    Attributes:
        title: above the lines; several lines of text are allowed.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        xs: places of all lines, ascending.
        lines: for each name its values at `xs`; one that is None or not finite is left out, and so
            is one that is not above 0 on a logarithmic axis.
        log_x: whether equal distances are equal ratios of xs.
        log_y: the same for values.
        marks: places among `xs` to mark; None: all.
    """

    title: str
    x_label: str
    y_label: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]
    log_x: bool = True
    log_y: bool = True
    marks: Sequence[float] | None = None


def write_line_plot(plot: LinePlot, path: Path) -> None:
    """Write lines to a file, in the look of the report.

    Args:
        plot: the lines.
        path: a .svg, .png or .pdf file.

    Raises:
        InputError: the path has another suffix.
        OSError: the file cannot be written.
    """
    with style():
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        ends = [
            (name, *_draw_line(axes, plot, values, Ink.SERIES[index % len(Ink.SERIES)]))
            for index, (name, values) in enumerate(plot.lines.items())
        ]
        axes.set_title(plot.title, loc="left", fontsize=11.5, color=Ink.TEXT, pad=12)
        axes.set_xlabel(plot.x_label)
        turned = len(plot.y_label) > 1
        axes.set_ylabel(plot.y_label, rotation=90 if turned else 0, labelpad=4 if turned else 8)
        _scale(axes, plot)
        name_lines(axes, [(name, end, ink) for name, end, ink in ends if end is not None])
        save_figure(
            figure,
            path,
            title=f"{plot.y_label} against {plot.x_label}: {' '.join(plot.title.split())}",
        )


def _draw_line(
    axes: Axes, plot: LinePlot, values: Sequence[float | None], ink: str
) -> tuple[tuple[float, float] | None, str]:
    """Draw a line; return its last point and its colour."""
    points = [
        (x, y)
        for x, y in zip(plot.xs, values, strict=True)
        if y is not None and math.isfinite(y) and (y > 0 or not plot.log_y)
    ]
    if not points:
        return None, ink
    axes.plot(*zip(*points, strict=True), color=ink)
    places = plot.xs if plot.marks is None else plot.marks
    marked = [point for point in points if point[0] in places]
    if marked and len(marked) <= _MAX_MARKS:
        axes.plot(*zip(*marked, strict=True), color=ink, ls="none", marker="o", ms=4)
    return points[-1], ink


def _scale(axes: Axes, plot: LinePlot) -> None:
    for is_log, axis in ((plot.log_x, axes.xaxis), (plot.log_y, axes.yaxis)):
        if is_log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            low, high = sorted(axis.get_view_interval())
            few = high < 500 * low
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
            axis.set_minor_locator(NullLocator())
        else:
            axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    if not plot.log_y and axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)


def _number(value: float) -> str:
    if abs(value) >= _MAX_PLAIN:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.10g}"

"""Lines over a common axis, each with its name at its end: bounds on ε, and the ε of a plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fedsim.core.formatting import count_text, epsilon_text
from fedsim.planning.bounds import BoundCurve
from fedsim.report.svg import Ink, save_figure, style

if TYPE_CHECKING:
    from fedsim.planning.projection import Plan

_LABEL_POINTS = 14.0  # least distance of two names


def name_lines(axes: Axes, ends: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Write the name of each line beside its last point, one above the other.

    Args:
        axes: with everything else drawn and scaled, inside `style()`.
        ends: of each line its name, its last point and its colour.
    """
    if not ends:
        return
    figure = cast(Figure, axes.figure)
    figure.draw_without_rendering()  # places are known after it
    scale = 72.0 / figure.dpi
    heights = axes.transData.transform([end for _, end, _ in ends])[:, 1] * scale
    order = sorted(range(len(ends)), key=lambda index: heights[index])
    places = _apart([float(heights[index]) for index in order])
    for index, place in zip(order, places, strict=True):
        name, end, ink = ends[index]
        axes.annotate(
            name,
            end,
            xytext=(9, place - float(heights[index])),
            textcoords="offset points",
            va="center",
            color=ink,
            annotation_clip=False,
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Return ascending places at least `_LABEL_POINTS` apart, moved as little as groups allow."""
    groups: list[tuple[float, int]] = []  # centre and number of names that stand together
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1 and _overlap(groups[-2], groups[-1]):
            (low, few), (high, more) = groups[-2:]
            groups[-2:] = [((low * few + high * more) / (few + more), few + more)]
    return [
        centre + _LABEL_POINTS * (index - (count - 1) / 2)
        for centre, count in groups
        for index in range(count)
    ]


def _overlap(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return other[0] - one[0] < _LABEL_POINTS * (one[1] + other[1]) / 2


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


def write_bounds_plot(
    curve: BoundCurve, path: Path, *, marks: Sequence[int] | None = None, whose: str = ""
) -> None:
    """Write the curves of all bounds to a file, each with its ε after all steps.

    Args:
        curve: ε at ascending numbers of steps.
        path: a .svg, .png or .pdf file.
        marks: numbers of steps to mark; None: all.
        whose: who takes the steps, in words; "" where the settings were given.

    Raises:
        InputError: the path has another suffix.
        OSError: the file cannot be written.
    """
    steps = [steps for steps, _ in curve.points]
    lines = {
        f"{bound.label} {epsilon_text(last)}": [epsilons[index] for _, epsilons in curve.points]
        for index, (bound, last) in enumerate(zip(curve.bounds, curve.last, strict=True))
        if last is not None
    }
    settings = f"{whose}: {curve.schedule.text}" if whose else curve.schedule.text
    plot = LinePlot(
        title=f"{settings}\nbeside each line: ε after {count_text(steps[-1], 'step')}",
        x_label="steps",
        y_label="ε",
        xs=steps,
        lines=lines,
        log_x=steps[-1] >= 10 * steps[0],
        marks=marks,
    )
    write_line_plot(plot, path)


_PLAN_INCHES = (6.4, 4.0)


def write_plan_plot(plan: "Plan", path: Path) -> None:
    """Write the curves to a file.

    Args:
        plan: the plan of every client.
        path: a .svg, .png or .pdf file.

    Raises:
        InputError: the file has another suffix.
        OSError: the file cannot be written.
    """
    with style():
        figure = Figure(figsize=_PLAN_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for client in plan.clients:
            points = [(rounds, value) for rounds, value in client.curve if math.isfinite(value)]
            if points:
                axes.plot(*zip((0, 0.0), *points, strict=True), color=Ink.ACCENT, alpha=0.5, lw=1.2)
        if plan.target_epsilon is not None:
            axes.axhline(plan.target_epsilon, color=Ink.MUTED, ls="--", lw=1.1)
            axes.annotate(
                "target",
                (0, plan.target_epsilon),
                xytext=(2, 3),
                textcoords="offset points",
                color=Ink.MUTED,
            )
        axes.set_xlabel("rounds that the client took part in")
        axes.set_ylabel(f"ε at δ = {plan.delta:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        save_figure(figure, path, title=f"Planned ε of each client at δ = {plan.delta:g}")

"""A figure: its numbers as a table, its axes, and one drawing for the page and for a file."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from fedsim.comparison.results import Results
from fedsim.core.formatting import epsilon_text
from fedsim.core.metrics import metric_entry
from fedsim.core.text_formats import csv_text
from fedsim.report.svg import Ink, inline_svg, standalone_svg, style

WIDE_INCHES = (400 / 72, 270 / 72)  # little more than a phone: text must stay legible there

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MARKERS = "os^Dv<>P"
_MAX_LEGEND_COLUMN = 12  # lines of a legend


@dataclass(frozen=True)
class Series:
    """Colour, dashes and marker of a variant in all figures; its number from 1 on in the page."""

    colour: str
    dashes: object
    marker: str
    number: int


@dataclass
class Tips:
    """The tooltips of a figure, by the gid of their artist."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> str:
        """Add a tooltip and return the gid for its artist."""
        gid = f"tip-{len(self.texts) + 1}"
        self.texts[gid] = text
        return gid


@dataclass(frozen=True)
class Picture:
    """A figure of a comparison.

    Attributes:
        name: its name in the page and of its files, such as `rounds`.
        caption: the line above it.
        label: description for screen readers.
        inches: width and height.
        columns: names of the columns of its CSV.
        rows: the numbers that are drawn; None is an empty cell.
        paint: draws the numbers into axes.
        warning: what every reader of the figure must know; also in the SVG file.
        series: what the legend of the SVG file shows of each variant; empty: no legend.
    """

    name: str
    caption: str
    label: str
    inches: tuple[float, float]
    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    paint: Callable[[Axes, Tips], None]
    series: Mapping[str, Series]
    warning: str = ""

    def inline(self) -> Markup:
        """Return the drawing in the colours of the page, without a legend: the page has one."""
        tips = Tips()
        with style():
            figure = Figure(figsize=self.inches, layout="constrained")
            self.paint(figure.add_subplot(), tips)
            return inline_svg(figure, name=self.name, label=self.label, tips=tips.texts)

    def to_svg(self) -> str:
        """Return the drawing as a file of its own: fixed colours, a legend, a white background."""
        with style():
            width, height = self.inches
            lines = min(len(self.series), _MAX_LEGEND_COLUMN)
            figure = Figure(figsize=(width, height + 0.22 * lines), layout="constrained")
            self.paint(figure.add_subplot(), Tips())
            self._add_legend(figure)
            if self.warning:
                figure.suptitle(self.warning, fontsize="small", color=Ink.MUTED, x=0.01, ha="left")
            return standalone_svg(figure, title=f"{self.label}. {self.warning}".strip())

    def _add_legend(self, figure: Figure) -> None:
        handles = [
            Line2D([], [], color=one.colour, ls=one.dashes, marker=one.marker, label=name)
            for name, one in self.series.items()
        ]
        if handles:
            figure.legend(
                handles=handles,
                loc="outside lower left",
                ncols=-(-len(handles) // _MAX_LEGEND_COLUMN),
                frameon=False,
                labelcolor=Ink.TEXT,
            )

    def to_csv(self) -> str:
        """Return the numbers as CSV."""
        return csv_text(self.columns, self.rows)


def series_of(results: Results) -> dict[str, Series]:
    """Return a colour for each variant; beyond eight they differ in their dashes too."""
    colours = Ink.SERIES
    return {
        variant.name: Series(
            colour=colours[index % len(colours)],
            dashes=_DASHES[index // len(colours) % len(_DASHES)],
            marker=_MARKERS[(index + index // len(colours)) % len(_MARKERS)],
            number=index + 1,
        )
        for index, variant in enumerate(results.variants)
    }


def figure_name(results: Results, name: str) -> str:
    """Return a name that is unique among the figures of both units of a comparison.

    Args:
        results: the variants of one unit.
        name: the figure.
    """
    return f"{name}-{results.groups[0].unit}" if results.has_sibling else name


_MAX_CURVE_POINTS = 300


def metric_axis(axes: Axes, metric: str, *, horizontal: bool = False) -> None:
    """Label an axis of a metric; it does not go beyond the metric's bounds.

    Args:
        axes: the axes, with everything drawn.
        metric: the metric on it.
        horizontal: whether it is the x axis.
    """
    axis = axes.xaxis if horizontal else axes.yaxis
    low, high = axes.get_xlim() if horizontal else axes.get_ylim()
    entry = metric_entry(metric)
    least, most = entry.bounds
    margin = 0.02 * (high - low)  # a line on the bound stays whole
    limits = max(low, least - margin), min(high, most + margin)
    (axes.set_xlim if horizontal else axes.set_ylim)(*limits)
    axis.set_major_locator(MaxNLocator(5 if horizontal else 6))
    if entry.in_percent:
        decimals = 1 if limits[1] - limits[0] < 0.04 else 0
        axis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def epsilon_axis(axes: Axes, epsilons: Sequence[float], beyond: float | None = None) -> None:
    """Make a logarithmic axis with readable numbers.

    Args:
        axes: the axes.
        epsilons: the values of ε on it.
        beyond: the place of clients without privacy; None: there are none.
    """
    low, high = min(epsilons), max([*epsilons, beyond or 0.0])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.35, high * 1.6)
    ticks = sorted({float(epsilon_text(e)) for e in epsilons if e > 0})
    if len(ticks) > 6:
        ticks = [
            step * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in (1, 2, 5)
            if low / 1.3 <= step * 10.0**power <= max(epsilons) * 1.3
        ]
    names = {tick: f"{tick:g}" for tick in ticks}
    if beyond is not None:
        names[beyond] = "no privacy"
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: names.get(tick, "")))
    axes.set_xlabel("ε of a run (its largest of any client)")


def thin(length: int) -> np.ndarray:
    """Return at most about `_MAX_CURVE_POINTS` indices, evenly spread, both ends among them."""
    count = min(length, _MAX_CURVE_POINTS)
    return np.unique(np.linspace(0, length - 1, count).round().astype(int))

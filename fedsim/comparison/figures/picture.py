"""A figure: its numbers as a table, and one drawing for the page and for a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsim.comparison.results import Results
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

"""Figures of matplotlib as inline SVG: no file, no network, and the colours of the page.

A figure is drawn in the placeholder colours of `Ink`. In the SVG they become CSS variables, so that
one drawing is legible on a light page, on a dark page and in print.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib
import matplotlib.style
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba, to_rgba_array
from matplotlib.figure import Figure

from fedsim.core.errors import InputError


class Ink:
    """Colours to draw with; each stands for a CSS variable of the page."""

    TEXT: Final = "#010101"
    MUTED: Final = "#010102"
    GRID: Final = "#010103"
    ACCENT: Final = "#010104"
    BAR: Final = "#010105"
    SERIES: Final = tuple(f"#01020{number}" for number in range(1, 9))  # told apart by colour


_VARIABLES = {
    Ink.TEXT: "var(--text)",
    Ink.MUTED: "var(--muted)",
    Ink.GRID: "var(--line)",
    Ink.ACCENT: "var(--accent)",
    Ink.BAR: "var(--bar)",
    **{ink: f"var(--series-{number})" for number, ink in enumerate(Ink.SERIES, start=1)},
}

# Any: newer versions of matplotlib type the keys as literals, older ones as str.
STYLE: Any = {
    # Text stays text: it is small, can be searched, and takes the font of the page.
    "svg.fonttype": "none",
    # Names of users may have dollar signs, which are no formulas.
    "text.parse_math": False,
    # Without a salt, matplotlib's ids are random and the report differs from run to run.
    "svg.hashsalt": "fedsim",
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": Ink.TEXT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": Ink.GRID,
    "axes.labelcolor": Ink.MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": Ink.GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "xtick.color": Ink.GRID,
    "ytick.color": Ink.GRID,
    "xtick.labelcolor": Ink.MUTED,
    "ytick.labelcolor": Ink.MUTED,
    "ytick.major.size": 0.0,
    "xtick.major.size": 3.0,
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw with matplotlib's defaults and `STYLE`, not with the user's own settings."""
    with matplotlib.style.context("default"), matplotlib.rc_context(STYLE):
        yield


def inline_svg(
    figure: Figure,
    *,
    name: str,
    label: str,
    tips: Mapping[str, str] | None = None,
) -> Markup:
    """Return a figure as an `<svg>` element to put into a page.

    Args:
        figure: drawn with `Ink` inside `style()`, and still inside it.
        name: unique in the page; it prefixes every id of the drawing.
        label: description of the figure for screen readers.
        tips: tooltips of artists, by the artist's gid.
    """
    buffer = io.StringIO()
    # Every key of the metadata that matplotlib would fill in is turned off: date, creator, links.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = _without_document_parts(text)
    for gid, tip in (tips or {}).items():
        text = text.replace(f'<g id="{gid}">', f"<g><title>{escape(tip)}</title>")
    text = _with_prefixed_ids(text, name)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    width, height = (round(inches * 72) for inches in figure.get_size_inches())
    opening = (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    )
    return Markup(re.sub(r"\A<svg[^>]*>", lambda _: opening, text))


_PAPER_SERIES = (  # as in comparison.html.jinja
    "#1d5bb8",
    "#b35300",
    "#1a7046",
    "#8a3fb0",
    "#b3261e",
    "#0a6f7d",
    "#74502f",
    "#59616b",
)
# Of the light page (style.html.jinja and comparison.html.jinja), for files that stand alone.
_PAPER = {
    Ink.TEXT: "#1b1f24",
    Ink.MUTED: "#5a626c",
    Ink.GRID: "#e2e3e0",
    Ink.ACCENT: "#1d5bb8",
    Ink.BAR: "#c3d3ec",
    **dict(zip(Ink.SERIES, _PAPER_SERIES, strict=True)),
}


def standalone_svg(figure: Figure, *, title: str) -> str:
    """Return a figure as an SVG file of its own: fixed colours on white, text as text.

    Args:
        figure: drawn with `Ink` inside `style()`, and still inside it.
        title: its description, in the file.
    """
    figure.set_facecolor("white")
    buffer = io.StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata={**metadata, "Title": title})
    text = buffer.getvalue()
    for ink, colour in _PAPER.items():
        text = text.replace(ink, colour)
    return text


FIGURE_SUFFIXES = (".svg", ".png", ".pdf")
_DPI = 200
_COLOUR_PROPERTIES = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def check_figure_path(path: Path) -> Path:
    """Return the path of a figure.

    Raises:
        InputError: it has no suffix of a kind of figure.
    """
    if path.suffix not in FIGURE_SUFFIXES:
        known = f"{', '.join(FIGURE_SUFFIXES[:-1])} or {FIGURE_SUFFIXES[-1]}"
        raise InputError(f"a plot is a {known} file, got {path.name!r}")
    return path


def save_figure(figure: Figure, path: Path, *, title: str) -> None:
    """Save a figure as a file of its own, in fixed colours on white.

    Args:
        figure: drawn with `Ink` inside `style()`, and still inside it.
        path: a .svg, .png or .pdf file.
        title: its description, in the file.

    Raises:
        InputError: the path has another suffix.
        OSError: the file cannot be written.
    """
    if check_figure_path(path).suffix == ".svg":
        path.write_text(standalone_svg(figure, title=title), encoding="utf-8")
        return
    figure.set_facecolor("white")
    figure.set_dpi(_DPI)  # as it is saved: the drawing below makes all ticks
    figure.draw_without_rendering()
    for artist in figure.findobj():
        _repaint(artist)
    metadata = {"Title": title} | ({"CreationDate": None} if path.suffix == ".pdf" else {})
    figure.savefig(path, dpi=_DPI, metadata=metadata)


def _repaint(artist: Artist) -> None:
    """Replace each placeholder of `Ink` in an artist by its colour on paper."""
    for name in _COLOUR_PROPERTIES:
        getter, setter = (getattr(artist, f"{kind}_{name}", None) for kind in ("get", "set"))
        if getter is None or setter is None:
            continue
        colours = to_rgba_array(getter())
        placeholders = [to_hex(colour) for colour in colours]
        if not set(placeholders) & _PAPER.keys():
            continue
        painted = [
            to_rgba(_PAPER.get(ink, ink), alpha=colour[3])
            for ink, colour in zip(placeholders, colours, strict=True)
        ]
        setter(painted if isinstance(artist, Collection) else painted[0])


def _without_document_parts(text: str) -> str:
    """Drop the parts of a separate SVG file; its styles for `*` would apply to the whole page."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # Fonts come from the page; an inline font would win over its style sheet.
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    return re.sub(r"\n\s*", "\n", text)


def _with_prefixed_ids(text: str, name: str) -> str:
    """Prefix ids, so that they are unique in the page; drop ids without a reference."""
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    wanted = {identifier for pair in used for identifier in pair if identifier}

    def rename(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in wanted else ""

    text = re.sub(r' id="([^"]+)"', rename, text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    return re.sub(r"url\(#", f"url(#{name}-", text)

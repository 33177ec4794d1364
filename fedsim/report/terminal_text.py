"""Sentences and tables in a terminal: no number is truncated or parted from its unit."""

import re
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

# Kept together: `ε = 8`, `δ = 0.001`, `± 1.2`, `22 steps`, `95 %`, `round 3`, `client 7`.
_GLUED = re.compile(
    r"(?<=[εδμzqC±≤=]) (?=[=≤∞\d])|(?<=\d) (?=%|pp\b|s\b|steps?\b|rounds?\b|clients?\b|examples?\b)"
    r"|(?<=\bround) (?=\d)|(?<=\bclient) (?=\d)|(?<=\baccuracy) (?=\d)|(?<=\bloss) (?=\d)"
)
_GLUE = "\u00a0"


def wrap_text(text: str, width: int, *, indent: str = "") -> str:
    """Return a text wrapped into lines of at most `width` characters.

    A longer word, such as a path, stays whole.

    Args:
        text: the text on one line.
        width: maximal length of a line, in characters.
        indent: prefix of every line but the first.
    """
    lines = textwrap.wrap(
        _GLUED.sub(_GLUE, text),
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")


def print_sentence(console: Console, text: str, style: str | None = None) -> None:
    """Print a sentence: wrapped to the width of a terminal, or on one line elsewhere."""
    if console.is_terminal:
        text = wrap_text(text, console.width, indent="  ")
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


_MAX_WIDTH_CHARACTERS = 1000
_MAX_NAME_CHARS = 30
MAX_TABLE_CLIENTS = 25


def figure_table(title: str, numbers: list[str], *, texts: Sequence[str] = ()) -> Table:
    """Return an empty table, narrow enough that ten columns of figures fit into 80 characters."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table without truncated numbers: with less padding, or wider than the terminal."""
    if _width(console, table) > console.width:
        table.padding = (0, 0, 0, 0)
    console.print(table, width=max(_width(console, table), console.width), crop=False)


def _width(console: Console, table: Table) -> int:
    return Measurement.get(
        console, console.options.update(width=_MAX_WIDTH_CHARACTERS), table
    ).maximum


def client_text(client: int, name: str | None) -> str:
    """Return a client's number, with its name where it has one."""
    if name is None:
        return str(client)
    return f"{client} {name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + '…'}"


def or_dash(value: float | None) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None else f"{value:g}"
